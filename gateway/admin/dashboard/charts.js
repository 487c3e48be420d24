// Line charts (uPlot) in the theme's colours.

import { byId, make } from "./dom.js";

const HEIGHT = 220;
const charts = new Set();

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/**
 * One chart in the element `id`. A line is {label, colour, class}; `format` writes values of the y axis, and
 * `step` is the least difference that it shows: finer ticks would all have the same label.
 */
export class Chart {
  constructor(id, { lines, format, step, isTime = false, min = 0, max = null }) {
    Object.assign(this, { node: byId(id), lines, format, step, isTime, min, max });
    this.data = null;
    this.plot = null;
    this.legend = make(
      "div",
      { class: "legend" },
      ...lines.map((line) =>
        make("span", { class: line.class }, make("i"), document.createTextNode(line.label)),
      ),
    );
    this.node.after(this.legend);
    new ResizeObserver(() => this.fit()).observe(this.node);
    charts.add(this);
  }

  /** `data`: x values, then the values of each line; null where there is none. */
  show(data, summary) {
    this.data = data;
    this.node.setAttribute("aria-label", summary);
    if (data[0].length < 2 && this.isTime) return;
    if (!this.plot) this.build();
    else this.plot.setData(data);
  }

  build() {
    if (!this.data) return;
    this.plot?.destroy();
    this.node.replaceChildren();
    const axis = {
      stroke: colour("--quiet"),
      grid: { stroke: colour("--line"), width: 1 },
      ticks: { show: false },
      font: "12px system-ui",
    };
    const series = this.lines.map((line) => ({
      label: line.label,
      stroke: colour(line.colour),
      width: 2,
      spanGaps: true,
      points: { show: !this.isTime, size: 6, fill: colour("--panel") },
    }));
    this.plot = new uPlot(
      {
        width: this.node.clientWidth,
        height: HEIGHT,
        legend: { show: false },
        cursor: { drag: { x: false, y: false } },
        scales: {
          x: { time: this.isTime, range: this.isTime ? undefined : rangeOfTurns },
          y: { range: (_, low, high) => this.range(high) },
        },
        axes: [
          {
            ...axis,
            size: 30,
            space: this.isTime ? 90 : 40,
            values: this.isTime ? timeLabels : undefined,
            incrs: this.isTime ? undefined : [1, 2, 5, 10],
          },
          {
            ...axis,
            size: 58,
            incrs: stepsFrom(this.step),
            values: (_, ticks) => ticks.map((tick) => this.format(tick)),
          },
        ],
        series: [{}, ...series],
      },
      this.data,
      this.node,
    );
  }

  range(high) {
    return [this.min, this.max ?? Math.max((high ?? 0) * 1.15, this.step * 5)];
  }

  fit() {
    this.plot?.setSize({ width: this.node.clientWidth, height: HEIGHT });
  }
}

/** 1, 2 and 5 times every power of ten, from `least` on. */
const stepsFrom = (least) =>
  Array.from({ length: 15 }, (_, power) => [1, 2, 5].map((digit) => digit * least * 10 ** power)).flat();
const rangeOfTurns = (_, low, high) => [Math.min(0.5, low ?? 1), Math.max(5, high ?? 1) + 0.5];
const timeLabels = (_, ticks) => ticks.map((tick) => new Date(tick * 1000).toLocaleTimeString("en-GB"));

/** After a change of theme. */
export function recolour() {
  for (const chart of charts) if (chart.plot) chart.build();
}
