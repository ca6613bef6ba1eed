// The condition of a GPU and its reason: one word on the card, which the totals count.

import { phrase } from "./dom.js";
import { count, duration } from "./words.js";
import { devicesOf, now, outermost } from "./pool_state.js";

/** `{ host, gpus, error }`: the GPUs of a host as `{ gpu, leases, condition }`, or the error in its data. */
export function seenOf(host) {
  try {
    return { host, gpus: conditionsOf(host), error: null };
  } catch (error) {
    return { host, gpus: [], error };
  }
}

function conditionsOf(host) {
  const byGPU = host.leasesByGPU();
  return [...host.gpus.values()].map((gpu) => {
    const leases = byGPU.get(gpu.key) ?? [];
    return { gpu, leases, condition: conditionOf(gpu, outermost(leases), host) };
  });
}

/** `kind` is one of free, held, outside, trouble; `why` is a text or a phrase, perhaps empty. */
function conditionOf(gpu, leases, host) {
  const row = gpu.row;
  if (gpu.missingSince !== null) {
    return trouble("Missing", `missing from the readings for ${duration((now() - gpu.missingSince) / 1000)}`);
  }
  if (row.fault) return trouble("Fault", row.fault);
  const quarantined = leases.find((lease) => lease.quarantine || lease.state === "quarantined");
  if (quarantined) {
    const { reason, seconds } = quarantined.quarantine ?? { reason: "its holder has lost it", seconds: 0 };
    const since = (seconds ?? 0) + (now() - (quarantined.seenAt ?? now())) / 1000;
    return trouble("Quarantined", phrase`for ${duration(since)}: ${reason ?? "no reason was given"}`);
  }
  if (leases.length > 0) {
    if (leases.every((lease) => lease.state === "offered")) return { kind: "held", word: "Offered", why: "" };
    const devices = row.mig_devices ?? [];
    const heldDevices = new Set(leases.flatMap((lease) => devicesOf(lease, row)));
    if (heldDevices.size > 0 && heldDevices.size < devices.length) {
      const left = `${devices.length - heldDevices.size} of ${count(devices.length, "MIG device", "MIG devices")} not held`;
      return { kind: "held", word: "Partly held", why: staleness(host) || left };
    }
    const isShared = leases.some((lease) => lease.share);
    return { kind: "held", word: isShared ? "Shared" : "Held", why: staleness(host) };
  }
  if (host.isStale) return trouble("Stale", staleness(host) || "not read yet");
  if (host.ledgerProblem !== null) return trouble("Unknown", "its leases are unknown");
  if (!Array.isArray(row.obstacles)) return trouble("Unknown", "its server does not report whether it is free");
  if (row.obstacles.length > 0) return { kind: "outside", word: "In use", why: outsiders(row) };
  return { kind: "free", word: "Free", why: row.processes?.length > 0 ? outsiders(row) : "" };
}

function trouble(word, why) {
  return { kind: "trouble", word, why };
}

function staleness(host) {
  const age = host.ageSeconds();
  if (!host.isStale || age === null) return "";
  return `last read ${duration(age)} ago`;
}

/** Which processes use a GPU without a lease. */
function outsiders(row) {
  if (row.leases?.length > 0) return "released a moment ago, not read since";
  const processes = row.processes ?? [];
  if (processes.length === 0) return `without a lease: ${row.obstacles[0]}`;
  const names = processes.slice(0, 2).map((process) => {
    const name = (process.name ?? `process ${process.pid}`).split("/").at(-1);
    return process.user ? phrase`${name} of ${process.user}` : phrase`${name}`;
  });
  const more = processes.length - names.length;
  const listed = names.flatMap((name, i) => (i === 0 ? name : [", ", ...name]));
  return phrase`without a lease: ${listed}${more > 0 ? ` and ${count(more, "more", "more")}` : ""}`;
}
