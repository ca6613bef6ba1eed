// The small chart of one GPU: compute and memory of the last readings, drawn only while it is visible.

import { setAttribute } from "./dom.js";

/** How often the description for screen readers is updated. */
const WORDS_MILLISECONDS = 10_000;

const colours = { compute: "", computeFill: "", memory: "", line: "" };
const charts = new Set();
/** Many charts are drawn less often: one second is less than a pixel wide. */
const MANY_CHARTS = 24;
const MANY_MILLISECONDS = 1800;

function readColours() {
  const style = getComputedStyle(document.documentElement);
  colours.compute = style.getPropertyValue("--compute").trim();
  colours.computeFill = style.getPropertyValue("--compute-fill").trim();
  colours.memory = style.getPropertyValue("--memory").trim();
}

const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) entry.target.gpuChart.setVisible(entry.isIntersecting);
});
const sized = new ResizeObserver((entries) => {
  for (const { target, contentRect } of entries) target.gpuChart.resize(contentRect.width, contentRect.height);
});

export class GPUChart {
  #plot = null;
  #width = 0;
  #height = 0;
  isVisible = false;
  #newest = null;
  #drawnAt = 0;
  #wordsAt = 0;
  #data = null;
  #host = null;

  constructor() {
    if (colours.compute === "") readColours();
    this.element = document.createElement("div");
    this.element.className = "chart";
    this.element.gpuChart = this;
    setAttribute(this.element, "role", "img");
    setAttribute(this.element, "aria-label", "the last readings");
    seen.observe(this.element);
    sized.observe(this.element);
    charts.add(this);
  }

  remove() {
    seen.unobserve(this.element);
    sized.unobserve(this.element);
    charts.delete(this);
    this.#plot?.destroy();
  }

  update(data, host) {
    this.#data = data;
    this.#host = host;
    this.#draw(false);
  }

  setVisible(isVisible) {
    this.isVisible = isVisible;
    this.#draw(true);
  }

  resize(width, height) {
    if ((Math.round(width) === this.#width && Math.round(height) === this.#height) || width < 1) return;
    this.#width = Math.round(width);
    this.#height = Math.round(height);
    this.#plot?.setSize({ width: this.#width, height: this.#height });
    this.#draw(true);
  }

  redraw() {
    this.#plot?.redraw(false);
  }

  #draw(isForced) {
    const data = this.#data;
    if (!this.isVisible || data === null || this.#width === 0) return;
    const newest = data.times.at(-1);
    if (!isForced && (newest === this.#newest || (charts.size > MANY_CHARTS && Date.now() - this.#drawnAt < MANY_MILLISECONDS))) return;
    this.#newest = newest;
    this.#drawnAt = Date.now();
    this.#plot ??= new uPlot(this.#options(), null, this.element);
    this.#plot.setData([data.times, data.utilization, data.memory]);
    this.#describe(data);
  }

  #describe(data) {
    if (Date.now() - this.#wordsAt < WORDS_MILLISECONDS) return;
    this.#wordsAt = Date.now();
    setAttribute(this.element, "aria-label", `last readings: compute ${range(data.utilization)}, memory ${range(data.memory)}`);
  }

  #options() {
    return {
      width: this.#width,
      height: this.#height,
      padding: [3, 0, 2, 0],
      legend: { show: false },
      cursor: { show: false },
      axes: [{ show: false }, { show: false }],
      scales: {
        x: { time: false, range: (_, __, last) => [last - this.#host.chartSeconds, last] },
        y: { range: [0, 100] },
      },
      series: [
        {},
        { stroke: () => colours.compute, fill: () => colours.computeFill, width: 1.5, points: { show: false } },
        { stroke: () => colours.memory, width: 1.5, dash: [5, 3], points: { show: false } },
      ],
    };
  }
}

function range(values) {
  const known = values.filter((value) => value !== null);
  if (known.length === 0) return "not known";
  const [lowest, highest] = [Math.round(Math.min(...known)), Math.round(Math.max(...known))];
  return lowest === highest ? `${highest} %` : `${lowest} to ${highest} %`;
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  readColours();
  for (const chart of charts) chart.redraw();
});
