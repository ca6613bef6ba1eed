// The card of one GPU: model, load, and holders.

import { make, setAttribute, setHidden, setText, showEach } from "./dom.js";
import { GPUChart } from "./gpu_chart.js";
import { HolderLine } from "./holder_line.js";
import { devicesOf, now, outermost } from "./pool_state.js";
import { count, degrees, gibibytes, percent, unbroken, watts } from "./words.js";

/** With many GPUs, texts change less often than bars: changing a text costs more than moving a bar. */
const CROWDED_MILLISECONDS = 1800;
/** Cards outside the window: for screen readers. */
const UNSEEN_MILLISECONDS = 5000;

export class GPUCard {
  #holders = new Map();
  #writtenAt = 0;
  #signature = "";

  constructor(release) {
    this.release = release;
    this.index = make("span", "index");
    this.model = make("p", "model");
    this.word = make("span", "word");
    this.memory = new Bar("Memory", "memory");
    this.compute = new Bar("Compute", "compute");
    this.chart = new GPUChart();
    this.facts = make("p", "facts");
    this.split = make("p", "split");
    this.why = make("p", "why");
    this.holderList = make("ul", "holders");
    this.together = make("p", "together");
    const title = make("h4", "", make("span", "unit", "GPU "), this.index);
    const state = make("p", "state", make("span", "sign"), this.word);
    this.element = make(
      "li", "gpu",
      make("div", "head", title, this.model, state),
      this.memory.element, this.compute.element, this.chart.element, this.facts, this.split,
      make("div", "who", this.why, this.holderList, this.together),
    );
  }

  remove() {
    this.chart.remove();
  }

  update({ gpu, leases, condition, host, isCrowded }) {
    const { row } = gpu;
    if (this.chart.isVisible) {
      this.memory.move(row.memory?.usage_percent);
      this.compute.move(row.utilization_percent);
    }
    this.chart.update(gpu.chart, host);
    // Grants and releases are shown at once, wherever the card is on the page.
    const signature = `${condition.word} ${this.release.isPossible()} ${leases.map((lease) => lease.lease_id)}`;
    const rest = !this.chart.isVisible ? UNSEEN_MILLISECONDS : isCrowded ? CROWDED_MILLISECONDS : 0;
    if (signature === this.#signature && now() - this.#writtenAt < rest) return;
    this.#signature = signature;
    this.#writtenAt = now();
    this.#write(gpu, leases, host, condition, isCrowded);
  }

  #write({ row }, leases, host, condition, isCrowded) {
    setAttribute(this.element, "data-kind", condition.kind);
    setAttribute(this.element, "data-word", condition.word);
    setAttribute(this.element, "data-gpu", String(row.gpu_id));
    setText(this.index, String(row.gpu_id));
    setText(this.model, shortened(row.name));
    setAttribute(this.model, "title", row.name ?? "");
    setText(this.word, condition.word);
    const memory = row.memory ?? {};
    const outer = outermost(leases);
    const promised = promisedMegabytes(outer, row);
    this.memory.write(memory.usage_percent, `${gibibytes(memory.used_mb)} / ${gibibytes(memory.total_mb)} GiB`);
    this.memory.mark(promised !== null && memory.total_mb ? (100 * promised) / memory.total_mb : null);
    this.compute.write(row.utilization_percent, percent(row.utilization_percent));
    setText(this.facts, facts(row, isCrowded));
    const devices = row.mig_devices?.length ?? 0;
    setText(this.split, count(devices, "MIG device", "MIG devices"));
    setHidden(this.split, devices === 0);
    const why = condition.kind === "free" ? "Not leased." : condition.why;
    setText(this.why, typeof why === "string" ? unbroken(why) : why);
    setHidden(this.why, why === "");
    showEach(this.holderList, this.#holders, leases, (lease) => lease.lease_id, () => new HolderLine(this.release));
    for (const view of this.#holders.values()) view.updateFor(host, row, outer.length === 1);
    setText(this.together, unbroken(together(outer, promised)));
    setHidden(this.together, outer.length < 2);
  }
}

class Bar {
  constructor(name, kind) {
    this.value = make("span", "value");
    this.fill = make("span", "fill");
    this.promise = make("span", "promise");
    this.promise.hidden = true;
    this.track = make("span", `track ${kind}`, this.promise, this.fill);
    setAttribute(this.track, "role", "meter");
    setAttribute(this.track, "aria-label", name);
    setAttribute(this.track, "aria-valuemin", "0");
    setAttribute(this.track, "aria-valuemax", "100");
    const label = make("span", "label", name);
    // Screen readers read the track.
    for (const each of [label, this.value]) setAttribute(each, "aria-hidden", "true");
    this.element = make("p", "bar", label, this.track, this.value);
    this.shown = undefined;
  }

  move(percentage) {
    if (percentage === this.shown) return;
    this.shown = percentage;
    this.fill.style.transform = `scaleX(${Math.min(100, percentage ?? 0) / 100})`;
  }

  write(percentage, text) {
    this.move(percentage);
    setText(this.value, text);
    const isKnown = percentage !== null && percentage !== undefined;
    this.track.classList.toggle("unknown", !isKnown);
    setAttribute(this.track, "aria-valuenow", isKnown ? String(Math.round(percentage)) : "0");
    setAttribute(this.track, "aria-valuetext", text.includes("–") ? "not known" : text.replace("/", "of"));
  }

  /** Marks how much memory is promised to holders. */
  mark(percentage) {
    const isShown = percentage !== null;
    setHidden(this.promise, !isShown);
    if (isShown && percentage !== this.marked) {
      this.marked = percentage;
      this.promise.style.width = `${Math.min(100, percentage)}%`;
    }
  }
}

/** How much memory of this GPU is promised to holders; a lease without an amount has the whole GPU. */
function promisedMegabytes(leases, row) {
  if (leases.length === 0) return null;
  const wholes = leases.flatMap((lease) => {
    const devices = devicesOf(lease, row);
    return (devices.length > 0 ? devices : [row]).map((whole) => lease.memory_mb ?? whole.memory?.total_mb ?? 0);
  });
  return wholes.reduce((sum, each) => sum + each, 0);
}

/** With several holders, only their total use is known. */
function together(leases, promised) {
  const used = Math.max(...leases.map((lease) => lease.memory_used_mb ?? NaN));
  return Number.isFinite(used) ? `Together they use ${gibibytes(used)} of ${gibibytes(promised)} GiB promised` : "";
}

/** `isShort`: only what fits into one line of a small card. */
function facts(row, isShort) {
  const found = [degrees(row.temperature_c), watts(row.power?.draw_w, isShort ? null : row.power?.limit_w)];
  if (!isShort) found.push(row.processes ? count(row.processes.length, "process", "processes") : "processes not visible");
  // A line ends only between two facts.
  return found.map((fact) => fact.replaceAll(" ", "\u00a0")).join(" · ");
}

/** Without the vendor. */
function shortened(name) {
  return (name || "unknown").replace(/^NVIDIA (GeForce )?/, "");
}
