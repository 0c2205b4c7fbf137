// The runs: their curves, and a table with the latest values of each.
import { Chart } from "./chart.js";
import { addRows, keepOnly, pointsOf, rowsOf } from "./curves.js";
import { byId, keyed, make, part, say } from "./dom.js";
import { ago, loss, small } from "./format.js";

const HUES = 7;
const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3]];
const AT_WORK_S = 20;

const hidden = new Set(); // runs whose lines are not drawn
const looks = new Map(); // the line style of each run, for as long as the page is open
const tenantHues = new Map();
let charts = null;

const shortId = (id) => id.replace(/^s-([0-9a-f]{6})[0-9a-f]*:train:/, "$1…/");
export const nameOf = (run) => run.name || shortId(run.model_id);

// A hue for each tenant and a dash for each of its runs. With one tenant, a hue for each run.
function lookOf(run, isOneTenant) {
  const known = looks.get(run.model_id);
  if (known?.isOneTenant === isOneTenant) {
    return known;
  }
  const others = [...looks.values()].filter((each) => each.isOneTenant === isOneTenant);
  let hue = others.length % HUES;
  let dash = Math.floor(others.length / HUES);
  if (!isOneTenant) {
    hue = hueOf(run.tenant) - 1;
    dash = others.filter((each) => each.tenant === run.tenant).length;
  }
  const look = {
    isOneTenant,
    tenant: run.tenant,
    colour: `--line-${hue + 1}`,
    dash: DASHES[dash % DASHES.length],
  };
  looks.set(run.model_id, look);
  return look;
}

export function hueOf(tenant) {
  if (!tenantHues.has(tenant)) {
    tenantHues.set(tenant, (tenantHues.size % HUES) + 1);
  }
  return tenantHues.get(tenant);
}

export function forgetLooks() {
  looks.clear();
  tenantHues.clear();
  hidden.clear();
}

function makeCharts() {
  const onHover = (text) => say(byId("readout"), text ?? "");
  return {
    loss: new Chart(byId("loss"), { format: (value, isTick) => (isTick ? String(+value.toPrecision(4)) : loss(value)), onHover }),
    rate: new Chart(byId("rate"), { format: (value) => (value === 0 ? "0" : small(value)), onHover }),
  };
}

function stateOf(run, nowS, unfinished) {
  if (run.diverged) {
    return ["diverged", "bad"];
  }
  if (run.status === "failed" || run.status === "lost") {
    return [run.status, "bad"];
  }
  if (run.status === "creating") {
    return ["starting", "quiet"];
  }
  const last = rowsOf(run.model_id).at(-1);
  const quietS = nowS - Math.max(run.last_request_s, last ? last[1] : 0);
  if (run.status === "ended") {
    return [`ended ${ago(quietS)}`, "quiet"];
  }
  if (quietS < AT_WORK_S) {
    return ["training", "good"];
  }
  return unfinished ? ["waiting", "warn"] : [`idle, ${ago(quietS)}`, "quiet"];
}

function makeRow(run, redraw) {
  const swatch = make("line", { x1: "1", y1: "5", x2: "27", y2: "5", "stroke-width": "3", class: "swatch" });
  const toggle = make(
    "button",
    { type: "button", class: "toggle", "aria-pressed": "true" },
    make("svg", { viewBox: "0 0 28 10", width: "28", height: "10", "aria-hidden": "true" }, swatch),
    make("span", { class: "name" }),
  );
  const below = make("small", { class: "below quiet of-all" });
  toggle.addEventListener("click", () => {
    const id = run.model_id;
    hidden.has(id) ? hidden.delete(id) : hidden.add(id);
    redraw();
  });
  const cell = (name, ...classes) => make("td", { class: [name, ...classes].join(" ") });
  return make(
    "tr",
    {},
    make("th", { scope: "row" }, toggle, below),
    cell("tenant", "of-all", "some"),
    cell("step", "number"),
    cell("loss", "number"),
    cell("rate", "number", "some"),
    cell("norm", "number", "some"),
    cell("adapter", "some"),
    make("td", {}, make("span", { class: "badge" })),
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
  say(part(row, "tenant"), run.tenant);
  say(part(row, "below"), run.tenant);
  say(part(row, "step"), last ? String(last[0]) : "–");
  say(part(row, "loss"), loss(lossPoint?.[1]));
  say(part(row, "rate"), small(last?.[3]));
  say(part(row, "norm"), small(last?.[4]));
  const rank = `rank ${run.rank}`;
  say(part(row, "adapter"), run.adapter === "lora" ? rank : `${run.adapter}, ${rank}`);
  const [text, tone] = state;
  const badge = part(row, "badge");
  say(badge, text);
  badge.dataset.tone = tone;
}

// Shows the runs of a look and returns how many of them are training.
export function showRuns(look) {
  addRows(look.curves);
  keepOnly(new Set(look.runs.map((run) => run.model_id)));
  charts ??= makeCharts();
  const hasRuns = look.runs.length > 0;
  byId("runs-empty").hidden = hasRuns;
  byId("charts").hidden = byId("run-table").hidden = !hasRuns;
  const isOneTenant = new Set(look.runs.map((run) => run.tenant)).size < 2;
  const unfinished = new Map(look.tenants.map((each) => [each.name, each.unfinished]));
  // The oldest run has the first hue, whatever its place in the list.
  const oldest = [...look.runs].sort((a, b) => a.created_s - b.created_s);
  const how = new Map(oldest.map((run) => [run.model_id, lookOf(run, isOneTenant)]));
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
  const redraw = () => showRuns({ ...look, curves: {} });
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
