// A line chart of several runs, on uPlot.
/* global uPlot */
import { byStep } from "./axes.js";

const FAINT = "40"; // the alpha of a line under its smoothed line, in hexadecimal
const PICTURE = { margin: 12, line: 18, font: "13px system-ui, sans-serif" };

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const axis = (size, values) => ({
  stroke: () => css("--quiet"),
  grid: { stroke: () => css("--grid"), width: 1 },
  ticks: { stroke: () => css("--grid"), width: 1, size: 4 },
  font: "11px system-ui, sans-serif",
  size,
  values,
});

// Lines: [{ id, name, colour (the name of a CSS variable), dash, points: [[x, y], …], faint }].
// `faint` holds the points before smoothing. Dragging across the chart calls `onZoom` with the two
// ends; a double click calls it with null.
export class Chart {
  constructor(element, { format, onHover = () => {}, onZoom = null }) {
    this.element = element;
    this.format = format;
    this.onHover = onHover;
    this.onZoom = onZoom;
    this.plot = null;
    this.lines = [];
    this.isLog = false;
    this.x = byStep;
    this.zoom = null;
    this.drawn = "";
    new ResizeObserver(() => this.resize()).observe(element);
    document.addEventListener("theme", () => this.rebuild());
  }

  show(lines, { x = byStep, zoom = null } = {}) {
    this.lines = lines.filter((line) => line.points.length);
    this.x = x;
    this.zoom = zoom;
    const points = this.lines.reduce((sum, line) => sum + line.points.length, 0);
    this.element.dataset.points = String(points);
    const latest = this.lines.map((line) => `${line.name} ${this.format(line.points.at(-1)[1])}`);
    this.element.setAttribute("aria-label", `Chart of ${latest.join(", ") || "nothing yet"}`);
    const drawn = JSON.stringify([this.isLog, x.name, this.lines.map((line) => [line.id, line.colour, line.dash, Boolean(line.faint)])]);
    if (this.plot && drawn === this.drawn) {
      this.plot.setData(this.data());
    } else {
      this.drawn = drawn;
      this.rebuild();
    }
  }

  // Each series of the plot, as [line, points].
  series() {
    const faint = this.lines.filter((line) => line.faint).map((line) => [line, line.faint, true]);
    return [...faint, ...this.lines.map((line) => [line, line.points, false])];
  }

  data() {
    if (!this.lines.length) {
      return [[], []];
    }
    const drawn = (value) => (this.isLog && value <= 0 ? null : value);
    return uPlot.join(
      this.series().map(([, points]) => [points.map((each) => each[0]), points.map((each) => drawn(each[1]))]),
    );
  }

  size() {
    return { width: this.element.clientWidth, height: this.element.clientHeight };
  }

  resize() {
    const { width, height } = this.size();
    if (this.plot && width && (width !== this.plot.width || height !== this.plot.height)) {
      this.plot.setSize({ width, height });
    } else if (!this.plot) {
      this.rebuild();
    }
  }

  rebuild() {
    const { width, height } = this.size();
    this.plot?.destroy();
    this.plot = null;
    if (!width || !this.lines.length) {
      return;
    }
    const series = this.series().map(([line, , isFaint]) => ({
      label: line.name,
      stroke: isFaint ? `${css(line.colour)}${FAINT}` : css(line.colour),
      width: isFaint ? 1 : 2,
      dash: line.dash,
      spanGaps: true,
      points: { show: (_, index) => !isFaint && this.series()[index - 1][1].length === 1 },
    }));
    const options = {
      width,
      height,
      padding: [10, 12, 0, 0],
      legend: { show: false },
      cursor: {
        y: false,
        points: { size: 7 },
        drag: { x: this.onZoom !== null, y: false, setScale: false },
        bind: { dblclick: () => () => this.onZoom?.(null) },
      },
      scales: { x: { time: false, range: (_, least, most) => this.range(least, most) }, y: { distr: this.isLog ? 3 : 1 } },
      axes: [
        axis(28, (_, ticks) => ticks.map((tick) => this.x.tick(tick))),
        axis(52, (_, ticks) => ticks.map((tick) => (tick === null ? "" : this.format(tick, true)))),
      ],
      series: [{}, ...series],
      hooks: { setCursor: [(plot) => this.hover(plot)], setSelect: [(plot) => this.select(plot)] },
    };
    this.plot = new uPlot(options, this.data(), this.element);
  }

  range(least, most) {
    const [from, to] = this.zoom ?? [least, most];
    return from === to ? [from - 1, to + 1] : [from, to];
  }

  select(plot) {
    const { left, width } = plot.select;
    if (width > 4 && this.onZoom) {
      this.onZoom([plot.posToVal(left, "x"), plot.posToVal(left + width, "x")]);
    }
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  }

  // Passes on the value of each line at the cursor, or just before it.
  hover(plot) {
    const place = plot.cursor.idx;
    if (place === null || place === undefined) {
      this.onHover(null);
      return;
    }
    const offset = 1 + plot.series.length - 1 - this.lines.length;
    const values = this.lines.map((line, index) => {
      const of = plot.data[index + offset];
      let at = place;
      while (at > 0 && (of[at] === null || of[at] === undefined)) {
        at -= 1;
      }
      return of[at] === null || of[at] === undefined ? null : `${line.name} ${this.format(of[at])}`;
    });
    this.onHover(`${this.x.say(plot.data[0][place])}: ${values.filter(Boolean).join(" · ")}`);
  }

  // A canvas with the title, the chart as drawn, and the names of its lines. Null without a chart.
  picture(title) {
    if (!this.plot) {
      return null;
    }
    const drawn = this.plot.ctx.canvas;
    const scale = drawn.width / this.plot.width;
    const { margin, line, font } = PICTURE;
    const canvas = document.createElement("canvas");
    canvas.width = drawn.width + 2 * margin * scale;
    canvas.height = drawn.height + (2 * margin + line * (this.lines.length + 1)) * scale;
    const context = canvas.getContext("2d");
    context.fillStyle = css("--panel");
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.drawImage(drawn, margin * scale, (margin + line) * scale);
    context.scale(scale, scale);
    context.font = font;
    context.fillStyle = css("--text");
    context.fillText(title, margin, margin + line / 2);
    this.lines.forEach((each, index) => {
      const y = margin + line * (index + 1.8) + this.plot.height;
      context.strokeStyle = css(each.colour);
      context.lineWidth = 2;
      context.setLineDash(each.dash);
      context.beginPath();
      context.moveTo(margin, y - 4);
      context.lineTo(margin + 28, y - 4);
      context.stroke();
      context.fillText(each.name, margin + 36, y);
    });
    return canvas;
  }
}
