// All runs: searched, sorted, filtered and paged by the server; the state is in the address.
import { byId, cell, fill, keyed, make, part, say } from "./dom.js";
import { ago, count, duration, loss, short } from "./format.js";
import { change, format, go, here } from "./route.js";
import { isArchived, nameOf, search, tagsOf, update } from "./run_data.js";
import { tenantOfKey } from "./session.js";

export const PAGE = 50;
export const MOST_COMPARED = 10;
const TONES = { running: "good", finished: "quiet", stopped: "warn", failed: "bad", diverged: "bad" };
const FIELDS = ["q", "state", "tag", "archived", "sort", "order"];
const SHOWN = [
  ["tenant", (run) => run.model_owner],
  ["status", (run) => run.state],
  ["step", (run) => (run.steps ? `${count(run.step ?? 0)} / ${count(run.steps)}` : run.step ? count(run.step) : "–")],
  ["loss", (run) => loss(run.loss)],
  ["held-out", (run) => loss(run.held_out_loss)],
  ["duration", (run) => (run.duration_s ? duration(run.duration_s) : "–")],
  ["tokens", (run) => short(run.tokens)],
  ["last", (run) => ago(Date.now() / 1000 - Date.parse(run.last_request_time) / 1000)],
];
const TITLES = { tenant: "Tenant", status: "State", step: "Step", loss: "Loss", "held-out": "Held-out loss", duration: "Duration", tokens: "Tokens", last: "Last request" };
const NUMBERS = new Set(["step", "loss", "held-out", "duration", "tokens"]);

let aborter = null;
let found = [];
const tags = new Set();
const owners = new Map(); // of the runs that were listed

export const toneOf = (state) => TONES[state] ?? "quiet";
const pickedOf = (query) => (query.runs ? query.runs.split(",") : []);

function asked(query) {
  const page = Math.max(Number.parseInt(query.page, 10) || 1, 1);
  return {
    q: query.q,
    state: query.state,
    tag: query.tag,
    archived: query.archived || "false",
    sort: query.sort || "created",
    order: query.order || "desc",
    limit: PAGE,
    offset: (page - 1) * PAGE,
  };
}

// --- rows -----------------------------------------------------------------------------------------

function pick(id, isPicked) {
  const picked = pickedOf(here().query).filter((each) => each !== id);
  say(byId("all-archived-now"), "");
  change({ runs: (isPicked ? [...picked, id] : picked).join(",") });
}

function makeRow(run) {
  const id = run.training_run_id;
  const box = make("input", { type: "checkbox", class: "pick" });
  box.addEventListener("change", () => pick(id, box.checked));
  const name = make("a", { class: "name", href: format("runs", id) });
  const cells = SHOWN.map(([column]) => {
    const classes = [...(NUMBERS.has(column) ? ["number"] : []), ...(column === "tenant" ? ["of-all"] : [])];
    return cell(column, TITLES[column], ...classes);
  });
  return make(
    "tr",
    { role: "row" },
    make("td", { class: "picks", role: "cell" }, box),
    make("th", { scope: "row", role: "rowheader" }, name, make("span", { class: "tags" })),
    ...cells,
  );
}

const tagButton = (tag) => {
  const button = make("button", { type: "button", class: "tag", "aria-label": `Filter by the tag ${tag}` }, tag);
  button.addEventListener("click", () => change({ tag, page: "" }));
  return button;
};

function updateRow(row, run, picked) {
  const id = run.training_run_id;
  const box = part(row, "pick");
  box.checked = picked.includes(id);
  box.disabled = !box.checked && picked.length >= MOST_COMPARED;
  box.setAttribute("aria-label", `Select ${nameOf(run)}`);
  const link = part(row, "name");
  say(link, nameOf(run));
  link.title = id;
  const shown = isArchived(run) ? ["archived", ...tagsOf(run)] : tagsOf(run);
  keyed(part(row, "tags"), shown, (tag) => tag, (tag) => (tag === "archived" ? make("span", { class: "quiet" }, tag) : tagButton(tag)), () => {});
  for (const [column, text] of SHOWN) {
    fill(row, column, text(run) || "–");
  }
  part(row, "status").firstElementChild.dataset.tone = toneOf(run.state);
}

// --- the view -------------------------------------------------------------------------------------

function showPicked(picked) {
  byId("picked").hidden = !picked.length;
  say(byId("picked-count"), `${picked.length} of at most ${MOST_COMPARED} selected`);
  byId("picked-compare").disabled = picked.length < 2;
}

function showRows(query) {
  const picked = pickedOf(query);
  keyed(byId("all-table").tBodies[0], found, (run) => run.training_run_id, makeRow, (row, run) => updateRow(row, run, picked));
  showPicked(picked);
}

function showPages(query, total) {
  const page = asked(query).offset / PAGE + 1;
  const last = Math.max(Math.ceil(total / PAGE), 1);
  const first = total ? (page - 1) * PAGE + 1 : 0;
  say(byId("all-count"), found.length ? `${count(first)} to ${count(first + found.length - 1)} of ${count(total)}` : `${count(total)} runs`);
  say(byId("all-page"), `Page ${count(page)} of ${count(last)}`);
  byId("all-previous").disabled = page <= 1;
  byId("all-next").disabled = page >= last;
  byId("all-pages").hidden = last === 1 && page === 1;
  byId("all-empty").hidden = found.length > 0;
  byId("all-table").hidden = !found.length;
  say(byId("all-empty"), FIELDS.some((name) => query[name]) || page > 1 ? "No run matches." : "No runs yet.");
}

function showSorting(query) {
  const { sort, order } = asked(query);
  for (const head of byId("all-table").querySelectorAll("th[data-sort]")) {
    const isSorted = head.dataset.sort === sort;
    head.setAttribute("aria-sort", isSorted ? (order === "asc" ? "ascending" : "descending") : "none");
  }
  for (const name of FIELDS) {
    const field = byId(`all-${name}`);
    const value = query[name] ?? { sort: "created", order: "desc" }[name] ?? "";
    if (document.activeElement !== field || field.tagName === "SELECT") {
      field.value = value;
    }
  }
}

// Asks for the page of runs that the address names, and shows it.
export async function showAllRuns(query) {
  showSorting(query);
  showPicked(pickedOf(query));
  aborter?.abort();
  const own = (aborter = new AbortController());
  try {
    const told = await search(asked(query), own.signal);
    if (own.signal.aborted) {
      return;
    }
    found = told.training_runs;
    found.forEach((run) => owners.set(run.training_run_id, run.model_owner));
    showRows(query);
    showPages(query, told.cursor.total_count);
    say(byId("all-problem"), "");
    byId("all-table").dataset.shown = JSON.stringify(asked(query));
  } catch (error) {
    if (!own.signal.aborted) {
      say(byId("all-problem"), error.message);
    }
    return;
  }
  const known = tags.size;
  found.flatMap(tagsOf).forEach((tag) => tags.add(tag));
  if (tags.size > known) {
    byId("all-tags").replaceChildren(...[...tags].sort().map((tag) => make("option", { value: tag })));
  }
}

function sortBy(column) {
  const { sort, order } = asked(here().query);
  const isTextual = column === "name" || column === "state";
  const turned = order === "asc" ? "desc" : "asc";
  change({ sort: column, order: sort === column ? turned : isTextual || column.includes("loss") ? "asc" : "desc", page: "" });
}

// Archives a run, unless it is another tenant's; returns whether it did.
async function archive(id) {
  const owner = owners.get(id);
  if (owner !== undefined && tenantOfKey() !== null && owner !== tenantOfKey()) {
    return false;
  }
  try {
    await update(id, { archived: "true" });
    return true;
  } catch (error) {
    if (error.status === 404) {
      return false; // selected on a page that was not listed since: another tenant's, or gone
    }
    throw error;
  }
}

async function archivePicked() {
  let text = "";
  try {
    const picked = pickedOf(here().query);
    let archived = 0;
    for (const id of picked) {
      archived += (await archive(id)) ? 1 : 0;
    }
    const left = picked.length - archived;
    text = left ? `${count(archived)} archived; ${count(left)} left out, because only keys of a run's own tenant can archive it.` : "";
    change({ runs: "" });
  } catch (error) {
    text = error.message;
  }
  say(byId("all-archived-now"), text);
  await showAllRuns(here().query);
}

export function installAllRuns() {
  byId("all-filter").addEventListener("submit", (event) => event.preventDefault());
  for (const name of FIELDS) {
    byId(`all-${name}`).addEventListener(name === "q" ? "input" : "change", (event) =>
      change({ [name]: event.target.value.trim(), page: "" }, { isTyping: name === "q" }),
    );
  }
  byId("all-tag").addEventListener("input", (event) => {
    if (event.target.value === "" || tags.has(event.target.value)) {
      change({ tag: event.target.value, page: "" }); // chosen from the list, or emptied
    }
  });
  for (const head of byId("all-table").querySelectorAll("th[data-sort]")) {
    head.querySelector("button").addEventListener("click", () => sortBy(head.dataset.sort));
  }
  const turn = (by) => change({ page: asked(here().query).offset / PAGE + 1 + by });
  byId("all-previous").addEventListener("click", () => turn(-1));
  byId("all-next").addEventListener("click", () => turn(1));
  byId("picked-compare").addEventListener("click", () => go("compare", "", { runs: here().query.runs }));
  byId("picked-clear").addEventListener("click", () => change({ runs: "" }));
  byId("picked-archive").addEventListener("click", archivePicked);
}
