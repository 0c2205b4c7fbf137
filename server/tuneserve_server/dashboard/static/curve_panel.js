// Charts of one or several runs under one toolbar: axis, smoothing, log scale, zoom and downloads.
// Their state is in the address: x, smooth, log, from and to.
import { AXES } from "./axes.js";
import { Chart } from "./chart.js";
import { keyed, make, part, say } from "./dom.js";
import { savePng, saveCsv } from "./download.js";
import { loss, seconds, short, small } from "./format.js";
import { lookAt } from "./looks.js";
import { change } from "./route.js";
import { COLUMNS, csvOf, pointsFrom, smoothed } from "./series.js";

const TITLES = Object.fromEntries(COLUMNS);
const NOISY = new Set(["loss", "grad_norm", "tokens_per_s", "step_time_s"]); // smoothed if asked
const LOGGED = new Set(["loss", "held_out_loss", "grad_norm"]);
const UNITS = { step: "step", tokens: "tokens", time: "seconds" };
const tickOr = (say) => (value, isTick) => (isTick ? String(+value.toPrecision(4)) : say(value));
const FORMATS = {
  loss: tickOr(loss),
  held_out_loss: tickOr(loss),
  learning_rate: (value) => (value === 0 ? "0" : small(value)),
  grad_norm: tickOr((value) => value.toPrecision(3)),
  tokens_per_s: (value) => short(value),
  step_time_s: (value, isTick) => (isTick ? String(+value.toPrecision(3)) : seconds(value)),
};

export function zoomOf(query) {
  const [from, to] = [query.from, query.to].map((text) => (text ? Number(text) : Number.NaN));
  return from < to ? [from, to] : null;
}

const labelled = (text, control) => make("label", {}, text, control);
const swatch = () =>
  make(
    "svg",
    { viewBox: "0 0 28 10", width: "28", height: "10", "aria-hidden": "true" },
    make("line", { x1: "1", y1: "5", x2: "27", y2: "5", "stroke-width": "3", class: "swatch" }),
  );
const rounded = (value) => String(+value.toPrecision(6));

export class CurvePanel {
  constructor(root) {
    this.charts = new Map();
    this.runs = [];
    this.axis = make("select", { name: "x" }, ...Object.keys(AXES).map((name) => make("option", { value: name }, name)));
    this.smooth = make("input", { type: "range", min: "0", max: "0.98", step: "0.02", name: "smooth" });
    this.log = make("button", { type: "button", class: "small", "aria-pressed": "false" }, "Log scale");
    this.from = make("input", { type: "number", step: "any", name: "from", inputmode: "decimal" });
    this.to = make("input", { type: "number", step: "any", name: "to", inputmode: "decimal" });
    this.whole = make("button", { type: "button", class: "small" }, "Reset zoom");
    this.csv = make("button", { type: "button", class: "small" }, "Download CSV");
    this.readout = make("p", { class: "readout quiet", "aria-hidden": "true" });
    this.figures = make("div", { class: "figures" });
    const tools = make(
      "div",
      { class: "tools", role: "group", "aria-label": "Chart settings" },
      labelled("Horizontal axis", this.axis),
      labelled("Smoothing", this.smooth),
      labelled("From", this.from),
      labelled("To", this.to),
      make("div", { class: "buttons" }, this.log, this.whole, this.csv),
    );
    root.replaceChildren(tools, make("p", { class: "quiet hint" }, "Drag across a chart to zoom; double-click to reset."), this.figures, this.readout);
    this.listen();
  }

  listen() {
    this.axis.addEventListener("change", () => change({ x: this.axis.value === "step" ? "" : this.axis.value, from: "", to: "" }));
    this.smooth.addEventListener("input", () => change({ smooth: Number(this.smooth.value) || "" }, { isTyping: true }));
    this.log.addEventListener("click", () => change({ log: this.log.getAttribute("aria-pressed") === "true" ? "" : 1 }));
    const range = () => change({ from: this.from.value, to: this.to.value });
    this.from.addEventListener("change", range);
    this.to.addEventListener("change", range);
    this.whole.addEventListener("click", () => change({ from: "", to: "" }));
    this.csv.addEventListener("click", () =>
      saveCsv(csvOf(this.runs.map((run) => [run.name, run.rows])), this.runs.length === 1 ? this.runs[0].name : "runs"),
    );
  }

  // Shows a chart for each group of columns. A run is { id, name, rows, colour, dash }. With
  // `isSingle`, each column has its own colour. A chart without a point is hidden.
  show(runs, groups, query, isSingle = false) {
    this.runs = runs;
    const axis = query.x in AXES ? query.x : "step";
    const smooth = Math.min(Math.max(Number(query.smooth) || 0, 0), 0.98);
    const zoom = zoomOf(query);
    this.axis.value = axis;
    this.smooth.value = String(smooth);
    this.smooth.setAttribute("aria-valuetext", smooth ? `weight ${smooth} on the past` : "none");
    this.log.setAttribute("aria-pressed", String(Boolean(query.log)));
    for (const [input, value] of [[this.from, query.from], [this.to, query.to]]) {
      if (document.activeElement !== input) {
        input.value = value ?? "";
      }
      input.placeholder = UNITS[axis];
    }
    this.whole.disabled = zoom === null;
    this.csv.disabled = !runs.some((run) => run.rows.length);
    const shown = { axis, smooth, zoom, isLog: Boolean(query.log), isSingle };
    keyed(this.figures, groups, ([column]) => column, (group) => this.figure(group), (element, group) =>
      this.draw(element, group, shown),
    );
    for (const column of this.charts.keys()) {
      if (!groups.some(([first]) => first === column)) {
        this.charts.delete(column);
      }
    }
  }

  draw(element, group, { axis, smooth, zoom, isLog, isSingle }) {
    const lines = this.runs.flatMap((run) =>
      group.map((column) => {
        const points = pointsFrom(run.rows, column, axis);
        const amount = NOISY.has(column) ? smooth : 0;
        const place = COLUMNS.findIndex(([name]) => name === column);
        const look = isSingle ? lookAt(place) : run;
        const name = isSingle ? TITLES[column] : run.name;
        return { id: `${run.id} ${column}`, name, colour: look.colour, dash: look.dash, points: smoothed(points, amount), faint: amount ? points : null };
      }),
    );
    element.hidden = !lines.some((line) => line.points.length);
    const chart = this.charts.get(group[0]);
    chart.isLog = isLog && LOGGED.has(group[0]);
    chart.show(lines, { x: AXES[axis], zoom });
    for (const [index, swatch] of element.querySelectorAll(".swatch").entries()) {
      swatch.style.stroke = `var(${lines[index].colour})`; // only a single run has several lines here
    }
    say(part(element, "by"), `, by ${axis}`);
  }

  figure(group) {
    const [column] = group;
    const titles = group.map((each, index) => (index ? TITLES[each].toLowerCase() : TITLES[each]));
    const about = titles.join(" and ");
    const place = make("div", { class: "chart", role: "img" });
    place.dataset.column = column;
    const png = make("button", { type: "button", class: "small", "aria-label": `Download ${about} as PNG` }, "PNG");
    const names = group.length === 1 ? [about] : titles.flatMap((each, index) => [...(index ? [" and "] : []), swatch(), ` ${each}`]);
    const title = make("span", {}, ...names, make("span", { class: "by" }));
    const figure = make("figure", {}, make("figcaption", {}, title, png), place);
    const chart = new Chart(place, {
      format: FORMATS[column],
      onHover: (text) => say(this.readout, text ?? ""),
      onZoom: (ends) => change(ends ? { from: rounded(ends[0]), to: rounded(ends[1]) } : { from: "", to: "" }),
    });
    png.addEventListener("click", () => {
      const names = this.runs.map((run) => run.name).join(", ");
      savePng(chart.picture(`${about}: ${names}`.slice(0, 90)), `${this.runs[0]?.name}-${column}`);
    });
    this.charts.set(column, chart);
    return figure;
  }
}
