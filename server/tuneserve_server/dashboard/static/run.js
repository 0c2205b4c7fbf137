// The page of a run.
import { isOver } from "./answers.js";
import { toneOf } from "./all_runs.js";
import { CurvePanel } from "./curve_panel.js";
import { byId, say } from "./dom.js";
import { copyable } from "./download.js";
import { format, here } from "./route.js";
import { isArchived, nameOf, pageOf, tagsOf, update } from "./run_data.js";
import { showAnswers, showCheckpoints, showConfig, showEvents, showSamples } from "./run_parts.js";
import { tenantOfKey } from "./session.js";

const GROUPS = [["loss", "held_out_loss"], ["learning_rate"], ["grad_norm"], ["tokens_per_s"], ["step_time_s"]];
const EVERY = { running: 4, over: 20 }; // looks, one per second

let panel = null;
let shown = null; // { run, rows, events, checkpoints } of the open page
let asking = 0;
let looks = 0;

function showHead(run) {
  const isNew = byId("run-title").dataset.id !== run.training_run_id;
  byId("run-title").dataset.id = run.training_run_id;
  say(byId("run-title"), nameOf(run));
  document.title = `${nameOf(run)} · tuneserve`;
  say(byId("run-state"), run.state);
  byId("run-state").dataset.tone = toneOf(run.state);
  say(byId("run-of"), `${run.model_owner} · ${run.base_model}`);
  if (isNew) {
    byId("run-id").replaceChildren(copyable(run.training_run_id));
  }
  say(byId("run-archive"), isArchived(run) ? "Take out of the archive" : "Archive");
  byId("run-compare").href = format("compare", "", { runs: run.training_run_id });
  const fields = { name: run.user_metadata?.name ?? "", tags: tagsOf(run).join(", "), notes: run.user_metadata?.notes ?? "" };
  for (const [name, value] of Object.entries(fields)) {
    const field = byId(`edit-${name}`);
    if (isNew || (document.activeElement !== field && field.value === field.dataset.saved)) {
      field.value = field.dataset.saved = value; // a field with unsaved text stays as it is
    }
  }
}

// Only keys of its tenant change a run; others see its tags and notes as text.
function showEdit(run) {
  const isOwn = run.model_owner === tenantOfKey();
  byId("edit").hidden = !isOwn;
  byId("edit-none").hidden = isOwn || tenantOfKey() === null;
  say(byId("edit-owner"), `Only keys of ${run.model_owner} can change this run.`);
  say(byId("edit-tagged"), tagsOf(run).length ? `Tags: ${tagsOf(run).join(", ")}` : "");
  say(byId("edit-noted"), run.user_metadata?.notes ? `Notes: ${run.user_metadata.notes}` : "");
}

function draw(query) {
  const { run, rows } = shown;
  panel.show([{ id: run.training_run_id, name: nameOf(run), rows }], GROUPS, query, true);
  byId("run-curves-none").hidden = rows.length > 0;
}

function show() {
  const { run, rows, events, checkpoints } = shown;
  showHead(run);
  showEdit(run);
  byId("run-diverged").hidden = !run.diverged;
  showAnswers(run, rows, events, Date.now() / 1000);
  showConfig(run);
  showCheckpoints(checkpoints);
  showSamples(events);
  showEvents(run, events);
  draw(here().query);
  byId("run-body").hidden = false;
}

async function load(id) {
  const own = (asking += 1);
  try {
    const found = await pageOf(id);
    if (own === asking) {
      shown = found;
      say(byId("run-problem"), "");
      show();
    }
  } catch (error) {
    if (own === asking) {
      say(byId("run-problem"), error.message);
    }
  }
}

export async function showRun(id, query) {
  if (shown?.run.training_run_id === id) {
    draw(query); // zoom and smoothing need no new data
    return;
  }
  shown = null;
  looks = 0;
  byId("run-body").hidden = byId("run-diverged").hidden = true;
  byId("answers").replaceChildren();
  for (const name of ["edit-state", "run-problem", "run-state", "run-of"]) {
    say(byId(name), "");
  }
  say(byId("run-title"), "Run");
  await load(id);
}

// Called each second while the page is open.
export function refreshRun(id) {
  looks += 1;
  if (shown) {
    showEdit(shown.run); // the first look tells the viewer's tenant
  }
  const every = shown && isOver(shown.run) ? EVERY.over : EVERY.running;
  if (looks % every === 0) {
    load(id);
  }
}

export function forgetRun() {
  shown = null;
}

async function save(metadata, done) {
  const id = shown.run.training_run_id;
  const isOpen = () => shown?.run.training_run_id === id; // another run may be open by then
  say(byId("edit-state"), "saving");
  try {
    await update(id, metadata);
    if (!isOpen()) {
      return;
    }
    for (const name of Object.keys(metadata)) {
      const field = byId(`edit-${name}`);
      if (field) {
        field.dataset.saved = field.value;
      }
    }
    await load(id);
    if (isOpen()) {
      say(byId("edit-state"), done);
    }
  } catch (error) {
    if (isOpen()) {
      say(byId("edit-state"), error.message);
    }
  }
}

export function installRun() {
  panel = new CurvePanel(byId("run-curves"));
  byId("edit").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = (name) => byId(`edit-${name}`).value.trim() || null;
    const tags = [...new Set((text("tags") ?? "").split(",").map((tag) => tag.trim()).filter(Boolean))];
    save({ name: text("name"), notes: text("notes"), tags: tags.join(",") || null }, "saved");
  });
  byId("run-archive").addEventListener("click", () => {
    const archive = !isArchived(shown.run);
    save({ archived: archive ? "true" : null }, archive ? "archived" : "taken out of the archive");
  });
}
