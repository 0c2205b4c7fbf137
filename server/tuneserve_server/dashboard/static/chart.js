// A line chart of several runs over their steps, on uPlot.
/* global uPlot */

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const axis = (size, values) => ({
  stroke: () => css("--quiet"),
  grid: { stroke: () => css("--grid"), width: 1 },
  ticks: { stroke: () => css("--grid"), width: 1, size: 4 },
  font: "11px system-ui, sans-serif",
  size,
  values,
});

// Lines: [{ id, name, colour (the name of a CSS variable), dash, points: [[x, y], …] }].
export class Chart {
  constructor(element, { format, onHover }) {
    this.element = element;
    this.format = format;
    this.onHover = onHover;
    this.plot = null;
    this.lines = [];
    this.isLog = false;
    this.drawn = "";
    new ResizeObserver(() => this.resize()).observe(element);
    document.addEventListener("theme", () => this.rebuild());
  }

  show(lines) {
    this.lines = lines.filter((line) => line.points.length);
    const points = this.lines.reduce((sum, line) => sum + line.points.length, 0);
    this.element.dataset.points = String(points);
    const latest = this.lines.map((line) => `${line.name} ${this.format(line.points.at(-1)[1])}`);
    this.element.setAttribute("aria-label", `Chart of ${latest.join(", ") || "nothing yet"}`);
    const drawn = JSON.stringify([this.isLog, this.lines.map((line) => [line.id, line.colour, line.dash])]);
    if (this.plot && drawn === this.drawn) {
      this.plot.setData(this.data());
    } else {
      this.drawn = drawn;
      this.rebuild();
    }
  }

  data() {
    if (!this.lines.length) {
      return [[], []];
    }
    const drawn = (value) => (this.isLog && value <= 0 ? null : value);
    return uPlot.join(
      this.lines.map(({ points }) => [points.map((each) => each[0]), points.map((each) => drawn(each[1]))]),
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
    const series = this.lines.map((line, index) => ({
      label: line.name,
      stroke: css(line.colour),
      width: 2,
      dash: line.dash,
      spanGaps: true,
      points: { show: () => this.lines[index].points.length === 1 },
    }));
    const options = {
      width,
      height,
      padding: [10, 12, 0, 0],
      legend: { show: false },
      cursor: { y: false, points: { size: 7 }, drag: { x: false, y: false } },
      scales: { x: { time: false }, y: { distr: this.isLog ? 3 : 1 } },
      axes: [
        axis(28, (_, ticks) => ticks.map((tick) => (Number.isInteger(tick) ? tick.toLocaleString("en") : ""))),
        axis(52, (_, ticks) => ticks.map((tick) => (tick === null ? "" : this.format(tick, true)))),
      ],
      series: [{}, ...series],
      hooks: { setCursor: [(plot) => this.hover(plot)] },
    };
    this.plot = new uPlot(options, this.data(), this.element);
  }

  // Passes on the value of each line at the cursor, or just before it.
  hover(plot) {
    const place = plot.cursor.idx;
    if (place === null || place === undefined) {
      this.onHover(null);
      return;
    }
    const values = this.lines.map((line, index) => {
      const of = plot.data[index + 1];
      let at = place;
      while (at > 0 && (of[at] === null || of[at] === undefined)) {
        at -= 1;
      }
      return of[at] === null || of[at] === undefined ? null : `${line.name} ${this.format(of[at])}`;
    });
    this.onHover(`step ${plot.data[0][place]}: ${values.filter(Boolean).join(" · ")}`);
  }
}
