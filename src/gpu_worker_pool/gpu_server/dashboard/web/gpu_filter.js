// The filter of the GPUs: which of them match a text and a kind. It does not know how it is shown.

/** What the page's address calls the kinds of conditions. */
const KINDS = new Map([["all", null], ["free", "free"], ["held", "held"], ["in-use", "outside"], ["trouble", "trouble"]]);
const MOST_CHARACTERS = 100;
/** "3", "8-15" or "0,2,8-15". */
const NUMBERS = /^\d{1,5}(-\d{1,5})?(,\d{1,5}(-\d{1,5})?)*,?$/;
/** A shorter part of a UUID says nothing. */
const LEAST_UUID = 6;

export class GPUFilter {
  constructor(text = "", show = "all") {
    this.text = text.slice(0, MOST_CHARACTERS);
    this.show = KINDS.has(show) ? show : "all";
    this.words = this.text.toLowerCase().split(/\s+/).filter(Boolean);
  }

  /** From the part of an address that begins with "#"; null if that part says nothing about a filter. */
  static fromHash(hash) {
    const said = new URLSearchParams(hash.replace(/^#/, ""));
    if (!said.has("find") && !said.has("show")) return null;
    return new GPUFilter(said.get("find") ?? "", said.get("show") ?? "all");
  }

  toHash() {
    if (!this.isActive) return "";
    const said = new URLSearchParams();
    if (this.words.length > 0) said.set("find", this.words.join(" "));
    if (this.show !== "all") said.set("show", this.show);
    return `#${said}`;
  }

  get isActive() {
    return this.show !== "all" || this.words.length > 0;
  }

  /** For each host `{ host, gpus }` also `shown`: the GPUs that match. */
  choose(seen) {
    const numbers = new Set(seen.flatMap(({ gpus }) => gpus.map(({ gpu }) => Number(gpu.row.gpu_id))));
    const tests = this.words.map((word) => testOf(word, numbers));
    const kind = KINDS.get(this.show);
    return seen.map((each) => {
      try {
        return { ...each, shown: each.gpus.filter((one) => isMatch(one, each.host, kind, tests)) };
      } catch (error) {
        // Data that cannot be searched does not affect the other hosts.
        return { ...each, shown: [], error };
      }
    });
  }
}

function isMatch(one, host, kind, tests) {
  if (kind !== null && one.condition.kind !== kind) return false;
  if (tests.length === 0) return true;
  const facts = { number: Number(one.gpu.row.gpu_id), uuids: uuidsOf(one.gpu.row), text: textOf(one, host) };
  return tests.every((test) => test(facts));
}

/** A number is the number of a GPU if there is such a GPU; else it is text, such as "3090" or "100". */
function testOf(word, numbers) {
  const ranges = NUMBERS.test(word) ? rangesOf(word) : [];
  const isWithin = (number) => ranges.some(([first, last]) => number >= first && number <= last);
  if ([...numbers].some(isWithin)) return ({ number }) => isWithin(number);
  return ({ text, uuids }) => text.includes(word) || (word.length >= LEAST_UUID && uuids.some((uuid) => uuid.startsWith(word)));
}

function rangesOf(word) {
  const parts = word.split(",").filter(Boolean);
  return parts.map((part) => part.split("-").map(Number)).map(([first, last = first]) => [first, last]);
}

function uuidsOf(row) {
  return [row, ...(row.mig_devices ?? [])].map(({ uuid }) => lower(uuid));
}

/** All that a person may look for: the GPU, its host, its holders, and the programs that use it without a lease. */
function textOf({ gpu: { row }, leases, condition }, host) {
  const found = [`gpu ${row.gpu_id}`, row.name, condition.word, host.isOwn ? "" : host.name];
  for (const device of row.mig_devices ?? []) found.push(device.name);
  for (const lease of leases) {
    const { user, host: origin, program } = lease.holder ?? {};
    found.push(lease.worker_id, lease.user, lease.label, user, origin, program);
  }
  for (const process of row.processes ?? []) found.push(process.name, process.user);
  return found.map(lower).join("\n");
}

function lower(value) {
  return value === null || value === undefined ? "" : String(value).toLowerCase();
}
