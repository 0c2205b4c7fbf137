// Up to ten runs on one chart; the runs and the metric are in the address.
import { MOST_COMPARED, toneOf } from "./all_runs.js";
import { isOver } from "./answers.js";
import { CurvePanel } from "./curve_panel.js";
import { byId, cell, fill, keyed, make, part, say } from "./dom.js";
import { loss, short } from "./format.js";
import { lookAt } from "./looks.js";
import { change, format, here } from "./route.js";
import { configOf, nameOf, pageOf } from "./run_data.js";
import { COLUMNS } from "./series.js";

const NAMES = COLUMNS.map(([name]) => name);

let panel = null;
let shown = []; // { run, rows } of the runs in the address, in its order
let asking = 0;

export const idsOf = (query) => [...new Set((query.runs ?? "").split(",").filter(Boolean))].slice(0, MOST_COMPARED);

function makeRow({ run }) {
  const id = run.training_run_id;
  const swatch = make("line", { x1: "1", y1: "5", x2: "27", y2: "5", "stroke-width": "3", class: "swatch" });
  const drop = make("button", { type: "button", class: "small drop" }, "Remove");
  drop.addEventListener("click", () => change({ runs: idsOf(here().query).filter((each) => each !== id).join(",") }));
  return make(
    "tr",
    { role: "row" },
    make(
      "th",
      { scope: "row", role: "rowheader" },
      make("svg", { viewBox: "0 0 28 10", width: "28", height: "10", "aria-hidden": "true" }, swatch),
      make("a", { class: "name", href: format("runs", id) }),
    ),
    cell("status", "State"),
    cell("loss", "Loss", "number"),
    cell("held-out", "Held-out loss", "number"),
    cell("rate", "Learning rate", "number"),
    cell("rank", "Rank", "number"),
    cell("tokens", "Tokens", "number"),
    make("td", { role: "cell" }, drop),
  );
}

function updateRow(row, { run }, look) {
  const line = part(row, "swatch");
  line.style.stroke = `var(${look.colour})`;
  say(part(row, "name"), nameOf(run));
  part(row, "drop").setAttribute("aria-label", `Remove ${nameOf(run)}`);
  const rate = configOf(run).learning_rate;
  const texts = { status: run.state, loss: loss(run.loss), "held-out": loss(run.held_out_loss), rate: rate === undefined ? "–" : String(rate), rank: String(run.lora_rank ?? "–"), tokens: short(run.tokens) };
  for (const [name, text] of Object.entries(texts)) {
    fill(row, name, text ?? "–");
  }
  part(row, "status").firstElementChild.dataset.tone = toneOf(run.state);
}

function draw(query) {
  const metric = NAMES.includes(query.metric) ? query.metric : "loss";
  byId("compare-metric").value = metric;
  const lines = shown.map(({ run, rows }, index) => ({ id: run.training_run_id, name: nameOf(run), rows, ...lookAt(index) }));
  panel.show(lines, [[metric]], query);
  const hasPoints = lines.some(({ rows }) => rows.some((row) => row[metric] !== null && row[metric] !== undefined));
  say(byId("compare-empty"), shown.length && !hasPoints ? "None of these runs has a point of this metric." : shown.length ? "" : "No run is selected: select runs in the list of all runs.");
  keyed(byId("compare-table").tBodies[0], shown, ({ run }) => run.training_run_id, makeRow, (row, each) =>
    updateRow(row, each, lookAt(shown.indexOf(each))),
  );
}

// A run that is over is read once, unless its session is open: then it may go on.
async function read(id) {
  const known = shown.find(({ run }) => run.training_run_id === id);
  return known && isOver(known.run) && known.run.status !== "ready" ? known : pageOf(id);
}

export async function showCompare(query) {
  const ids = idsOf(query);
  const own = (asking += 1);
  byId("compare-back").href = format("runs", "", { runs: ids.join(",") });
  const isSame = ids.join() === shown.map(({ run }) => run.training_run_id).join();
  if (isSame) {
    draw(query); // zoom and smoothing need no new data
  }
  const told = await Promise.allSettled(ids.map(read));
  if (own !== asking) {
    return;
  }
  shown = told.filter((each) => each.status === "fulfilled").map((each) => each.value);
  say(byId("compare-problem"), told.find((each) => each.status === "rejected")?.reason.message ?? "");
  draw(here().query);
}

export function installCompare() {
  panel = new CurvePanel(byId("compare-curves"));
  byId("compare-metric").append(...COLUMNS.map(([value, title]) => make("option", { value }, title)));
  byId("compare-metric").addEventListener("change", (event) => change({ metric: event.target.value === "loss" ? "" : event.target.value }));
}
