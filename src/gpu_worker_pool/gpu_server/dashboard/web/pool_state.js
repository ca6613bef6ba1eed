// The state of the hosts: their GPUs, leases and queues. It does not know how they are shown.

const CHART_POINTS = 90;
/** A gap in the chart begins this long after the last reading. */
const GAP_SECONDS = 0.001;
/** After more intervals without a reading, the chart has a gap, and the host is stale. */
const USUAL_INTERVALS = 3;

export function now() {
  // Not `performance.now()`, which stands still while a laptop sleeps.
  return Date.now();
}

export function gpuKey(gpu) {
  return gpu.uuid ?? `index ${gpu.gpu_id}`;
}

export class Host {
  constructor(name, { isOwn, url = null, intervalSeconds = 1 }) {
    this.name = name;
    this.key = isOwn ? "" : name;
    this.isOwn = isOwn;
    this.url = url;
    this.intervalSeconds = intervalSeconds;
    this.health = { status: null, error: null };
    /** Why it is not reachable; null while it is. */
    this.problem = null;
    /** When the newest readings were taken, in milliseconds of this browser's clock; null before the first. */
    this.readAt = null;
    /** By key: `{ key, row, chart, missingSince }`. */
    this.gpus = new Map();
    /** By id, with `since`: when it was granted. Null if unknown. */
    this.leases = new Map();
    /** Why the leases are unknown; null while they are known. */
    this.ledgerProblem = null;
    /** Why the details are unknown; null while they are known. */
    this.detailsProblem = null;
    this.queue = [];
    this.waiting = 0;
  }

  get chartSeconds() {
    return CHART_POINTS * Math.max(this.intervalSeconds, 1);
  }

  ageSeconds() {
    return this.readAt === null ? null : Math.max(0, (now() - this.readAt) / 1000);
  }

  /** Whether its readings are too old. */
  get isStale() {
    const age = this.ageSeconds();
    const usual = Math.max(5, USUAL_INTERVALS * this.intervalSeconds + 2);
    return age === null || age > usual || this.problem !== null || ["degraded", "unhealthy"].includes(this.health.status);
  }

  takeStats(stats) {
    this.readAt = now() - (stats.sample_age_seconds ?? 0) * 1000;
    const seen = new Set();
    for (const row of stats.gpus) {
      const key = gpuKey(row);
      seen.add(key);
      let gpu = this.gpus.get(key);
      if (gpu === undefined) {
        gpu = { key, row, chart: new Chart(), missingSince: null };
        this.gpus.set(key, gpu);
      }
      gpu.row = row;
      gpu.missingSince = null;
      gpu.chart.add(this.readAt / 1000, row.utilization_percent, row.memory?.usage_percent ?? null, this);
    }
    for (const gpu of this.gpus.values()) {
      if (!seen.has(gpu.key)) gpu.missingSince ??= now();
    }
  }

  /** Fills the gaps of the charts from `/gpu/history`. */
  takeHistory(history) {
    const newest = now() / 1000 - (history.sample_age_seconds ?? 0);
    for (const past of history.gpus ?? []) {
      const gpu = this.gpus.get(gpuKey(past));
      const readings = past.readings ?? [];
      if (gpu === undefined || readings.length === 0) continue;
      // Only differences count: the server's clock and time zone may differ.
      const last = Date.parse(readings.at(-1).timestamp);
      const live = gpu.chart.readings();
      const loaded = readings
        .map((reading) => ({
          at: newest - (last - Date.parse(reading.timestamp)) / 1000,
          utilization: reading.utilization_percent,
          memory: reading.memory_usage_percent,
        }))
        .filter(({ at }) => Number.isFinite(at) && !live.some((seen) => Math.abs(seen.at - at) < this.intervalSeconds / 2));
      gpu.chart = new Chart();
      for (const { at, utilization, memory } of [...loaded, ...live].sort((one, other) => one.at - other.at)) {
        gpu.chart.add(at, utilization, memory, this);
      }
    }
  }

  takeLeases(rows) {
    this.leases = rows === null ? null : new Map(rows.map((row) => [row.lease_id, withSince(row)]));
  }

  takeLease(row) {
    (this.leases ??= new Map()).set(row.lease_id, withSince(row));
  }

  endLease(leaseId) {
    this.leases?.delete(leaseId);
  }

  takeQueue(rows, waiting = rows.length) {
    this.queue = rows.map((row) => ({ ...row, since: before(row.waiting_seconds) }));
    this.waiting = waiting;
  }

  /** The leases by GPU; MIG devices count as their GPU. */
  leasesByGPU() {
    const parents = new Map();
    for (const gpu of this.gpus.values()) {
      for (const device of gpu.row.mig_devices ?? []) parents.set(device.uuid, gpu.key);
    }
    const found = new Map();
    for (const lease of this.leases?.values() ?? []) {
      const keys = new Set((lease.gpus ?? []).map((held) => parents.get(held.uuid) ?? gpuKey(held)));
      for (const key of keys) {
        if (!found.has(key)) found.set(key, []);
        found.get(key).push(lease);
      }
    }
    return found;
  }
}

/** Of the leases on a GPU those that stand for the others, which are inside them. */
export function outermost(leases) {
  return leases.filter((lease) => !leases.some((other) => other.lease_id === lease.within));
}

/** The MIG devices of this GPU that a lease holds; empty for a lease of whole GPUs. */
export function devicesOf(lease, row) {
  const held = new Set((lease.gpus ?? []).map((gpu) => gpu.uuid));
  return (row.mig_devices ?? []).filter((device) => device.uuid && held.has(device.uuid));
}

function withSince(row) {
  return { ...row, seenAt: now(), since: before(row.held_seconds) };
}

/** The moment `seconds` ago; null if unknown. */
function before(seconds) {
  return seconds === null || seconds === undefined ? null : now() - seconds * 1000;
}

/** How long ago that was; null if unknown. */
export function secondsSince(moment) {
  return moment === null ? null : (now() - moment) / 1000;
}

/** The last readings of one GPU. */
class Chart {
  times = [];
  utilization = [];
  memory = [];

  add(at, utilization, memory, host) {
    const last = this.times.at(-1);
    if (last !== undefined && at <= last) return;
    // A gap in the readings is a gap in the chart.
    if (last !== undefined && at - last > USUAL_INTERVALS * host.intervalSeconds + 1) this.#push(last + GAP_SECONDS, null, null);
    this.#push(at, utilization ?? null, memory ?? null);
    while (this.times[1] < at - host.chartSeconds || this.times.length > 2 * CHART_POINTS) {
      this.times.shift();
      this.utilization.shift();
      this.memory.shift();
    }
  }

  /** The readings without the gaps. */
  readings() {
    return this.times
      .map((at, i) => ({ at, utilization: this.utilization[i], memory: this.memory[i] }))
      .filter(({ at }, i) => i === 0 || at - this.times[i - 1] > 2 * GAP_SECONDS);
  }

  #push(at, utilization, memory) {
    this.times.push(at);
    this.utilization.push(utilization);
    this.memory.push(memory);
  }
}
