// The runs that were used last: their curves, and a table with the latest values of each.
import { toneOf } from "./all_runs.js";
import { Chart } from "./chart.js";
import { addRows, keepOnly, pointsOf, rowsOf } from "./curves.js";
import { byId, cell, fill, keyed, make, part, say } from "./dom.js";
import { ago, loss, small } from "./format.js";
import { forgetLooks, lookOf } from "./looks.js";
import { format } from "./route.js";
import { shortId } from "./run_data.js";

const AT_WORK_S = 20;

const hidden = new Set(); // runs whose lines are not drawn
let charts = null;

const nameOf = (run) => run.name || shortId(run.model_id);

export function forgetLive() {
  forgetLooks();
  hidden.clear();
}

function makeCharts() {
  const onHover = (text) => say(byId("readout"), text ?? "");
  return {
    loss: new Chart(byId("loss"), { format: (value, isTick) => (isTick ? String(+value.toPrecision(4)) : loss(value)), onHover }),
    rate: new Chart(byId("rate"), { format: (value) => (value === 0 ? "0" : small(value)), onHover }),
  };
}

// The state of a run in the table, as [text, tone].
export function stateOf(run, nowS, unfinished) {
  if (run.status === "failed" || run.status === "lost") {
    return [run.status, "bad"];
  }
  if (run.status === "creating") {
    return ["starting", "quiet"];
  }
  const last = rowsOf(run.model_id).at(-1);
  const quietS = nowS - Math.max(run.last_request_s, last ? last[1] : 0);
  if (run.state !== "running") {
    return [`${run.state} ${ago(quietS)}`, toneOf(run.state)];
  }
  if (quietS < AT_WORK_S) {
    return ["training", "good"];
  }
  return unfinished ? ["waiting", "warn"] : [`idle, ${ago(quietS)}`, "quiet"];
}

// A model whose replay gave other bits goes on, or ended, like any other: that is no state of its own.
export const badgeOf = (run, [text, tone]) =>
  run.diverged ? [`${text}, restored with other results`, tone === "bad" ? tone : "warn"] : [text, tone];

function makeRow(run, redraw) {
  const swatch = make("line", { x1: "1", y1: "5", x2: "27", y2: "5", "stroke-width": "3", class: "swatch" });
  const toggle = make(
    "button",
    { type: "button", class: "toggle", "aria-pressed": "true" },
    make("svg", { viewBox: "0 0 28 10", width: "28", height: "10", "aria-hidden": "true" }, swatch),
    make("span", { class: "name" }),
  );
  toggle.addEventListener("click", () => {
    const id = run.model_id;
    hidden.has(id) ? hidden.delete(id) : hidden.add(id);
    redraw();
  });
  const link = make("a", { class: "open", href: format("runs", run.model_id) }, "Open");
  return make(
    "tr",
    { role: "row" },
    make("th", { scope: "row", role: "rowheader" }, toggle),
    cell("tenant", "Tenant", "of-all"),
    cell("step", "Step", "number"),
    cell("loss", "Loss", "number"),
    cell("rate", "Learning rate", "number"),
    cell("norm", "Gradient norm", "number"),
    cell("adapter", "Adapter"),
    cell("badge", "State"),
    make("td", { role: "cell" }, link),
  );
}

function updateRow(row, run, look, state) {
  const last = rowsOf(run.model_id).at(-1);
  const lossPoint = pointsOf(run.model_id, 2).at(-1);
  const line = part(row, "swatch");
  line.style.stroke = `var(${look.colour})`;
  line.style.strokeDasharray = look.dash.map((each) => each * 0.8).join(" ");
  const toggle = part(row, "toggle");
  toggle.setAttribute("aria-pressed", String(!hidden.has(run.model_id)));
  toggle.title = `${run.model_id}: show or hide its lines`;
  say(part(row, "name"), nameOf(run));
  fill(row, "tenant", run.tenant);
  fill(row, "step", last ? String(last[0]) : "–");
  fill(row, "loss", loss(lossPoint?.[1]));
  fill(row, "rate", small(last?.[3]));
  fill(row, "norm", small(last?.[4]));
  const rank = `rank ${run.rank}`;
  fill(row, "adapter", run.adapter === "lora" ? rank : `${run.adapter}, ${rank}`);
  const [text, tone] = badgeOf(run, state);
  part(row, "open").setAttribute("aria-label", `Open the page of ${nameOf(run)}`);
  const badge = part(row, "badge").firstElementChild;
  say(badge, text);
  badge.dataset.tone = tone;
}

// Shows the runs of a look and returns how many of them are training.
export function showLive(look) {
  addRows(look.curves);
  keepOnly(new Set(look.runs.map((run) => run.model_id)));
  charts ??= makeCharts();
  const hasRuns = look.runs.length > 0;
  byId("runs-empty").hidden = hasRuns;
  byId("charts").hidden = byId("run-table").hidden = !hasRuns;
  const unfinished = new Map(look.tenants.map((each) => [each.name, each.unfinished]));
  // The oldest run has the first colour, whatever its place in the list.
  const oldest = [...look.runs].sort((a, b) => a.created_s - b.created_s);
  const how = new Map(oldest.map((run) => [run.model_id, lookOf(run.model_id)]));
  const states = new Map(
    look.runs.map((run) => [run.model_id, stateOf(run, look.now_s, unfinished.get(run.tenant))]),
  );
  const draw = (chart, column) =>
    chart.show(
      oldest
        .filter((run) => !hidden.has(run.model_id))
        .map((run) => ({
          id: run.model_id,
          name: nameOf(run),
          points: pointsOf(run.model_id, column),
          ...how.get(run.model_id),
        })),
    );
  const redraw = () => showLive({ ...look, curves: {} });
  byId("log").hidden = !hasRuns;
  byId("log").onclick = () => {
    charts.loss.isLog = !charts.loss.isLog;
    byId("log").setAttribute("aria-pressed", String(charts.loss.isLog));
    redraw();
  };
  keyed(
    byId("run-table").tBodies[0],
    look.runs,
    (run) => run.model_id,
    (run) => makeRow(run, redraw),
    (row, run) => updateRow(row, run, how.get(run.model_id), states.get(run.model_id)),
  );
  draw(charts.loss, 2);
  draw(charts.rate, 3);
  return [...states.values()].filter(([text]) => text === "training").length;
}
