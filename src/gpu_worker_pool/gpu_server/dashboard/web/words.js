// Numbers and names as texts. An unknown value is a dash, never a zero.

const UNKNOWN = "–";

/** A line does not end between a number and its unit. */
export function unbroken(text) {
  return String(text).replace(/(\d) (?=(?:s|min|h|d|%|MiB|GiB|°C|W)(?![\w]))/g, "$1\u00a0").replace(/\bGPU (?=\d)/g, "GPU\u00a0");
}

export function gibibytes(megabytes) {
  if (megabytes === null || megabytes === undefined) return UNKNOWN;
  const amount = megabytes / 1024;
  return amount < 9.95 ? amount.toFixed(1).replace(/\.0$/, "") : String(Math.round(amount));
}

export function percent(value) {
  return value === null || value === undefined ? UNKNOWN : `${Math.round(value)} %`;
}

export function degrees(value) {
  return value === null || value === undefined ? `${UNKNOWN} °C` : `${Math.round(value)} °C`;
}

export function watts(draw, limit) {
  if (draw === null || draw === undefined) return `${UNKNOWN} W`;
  return limit ? `${Math.round(draw)}/${Math.round(limit)} W` : `${Math.round(draw)} W`;
}

/** How long ago the readings were taken. */
export function age(seconds) {
  return seconds < 2 ? "read just now" : `read ${duration(seconds)} ago`;
}

/** "7 s", "12 min", "2 h 5 min", "3 d 4 h": two parts at most, in one line. */
export function duration(seconds) {
  if (seconds === null || !Number.isFinite(seconds)) return UNKNOWN;
  return partsOf(seconds).replaceAll(" ", "\u00a0");
}

function partsOf(seconds) {
  const whole = Math.max(0, Math.floor(seconds));
  if (whole < 60) return `${whole} s`;
  const minutes = Math.floor(whole / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 24) return minutes % 60 ? `${hours} h ${minutes % 60} min` : `${hours} h`;
  const days = Math.floor(hours / 24);
  return hours % 24 ? `${days} d ${hours % 24} h` : `${days} d`;
}

export function count(number, one, many) {
  return `${number} ${number === 1 ? one : many}`;
}

const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });

export function timeOfDay(milliseconds) {
  return clock.format(milliseconds);
}

const dayAndClock = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });

export function momentOf(milliseconds) {
  if (milliseconds === null || Number.isNaN(new Date(milliseconds).getTime())) return UNKNOWN;
  // Rounded, as the clocks of browser and server differ by fractions of a second.
  return dayAndClock.format(1000 * Math.round(milliseconds / 1000));
}

/** The name of a holder or waiter: its user, program and pid, else its key's name and worker id, else its user, else its request. */
export function nameOf(row) {
  if (!row.holder && row.account && !row.account.includes(" ")) return [row.account, row.worker_id].filter(Boolean).join(" ");
  const worker = row.worker_id || (row.user ? `user ${row.user}` : "") || (row.request_id || row.lease_id || "unknown").slice(0, 16);
  const { holder } = row;
  if (!holder) return worker;
  const who = [holder.user, holder.program].filter(Boolean).join(" ") || worker;
  const facts = [holder.pid ? `pid ${holder.pid}` : "", holder.verified ? "" : "unverified"].filter(Boolean).join(", ");
  return facts === "" ? who : `${who} (${facts})`;
}

/** The same with its host and label, where there is room. */
export function fullNameOf(row) {
  return [nameOf(row), row.holder?.host ? `on ${row.holder.host}` : "", row.label].filter(Boolean).join(" · ");
}

/** "GPU 3" or "GPUs 1, 2 and 5". */
export function gpuNames(gpus) {
  const numbers = (gpus ?? []).map((gpu) => String(gpu.gpu_id ?? "?")).sort((one, other) => one.localeCompare(other, "en", { numeric: true }));
  if (numbers.length === 0) return "no GPU";
  if (numbers.length === 1) return `GPU ${numbers[0]}`;
  if (numbers.length > 8) return `${numbers.length} GPUs`;
  return `GPUs ${numbers.slice(0, -1).join(", ")} and ${numbers.at(-1)}`;
}
