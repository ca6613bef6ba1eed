// Who used how much: a table for the last day and one for the last month, loaded when somebody opens it.

import { byId, make, setText } from "./dom.js";
import { askQuietly } from "./server.js";

const SPANS = { day: "Last 24 hours", month: "Last 30 days" };
const COLUMNS = ["who", "leases", "GPU hours", "idle", "median wait", "90 % waited less than", "refused"];

export function offerUsage() {
  const box = byId("usage");
  box.addEventListener("toggle", () => {
    if (box.open) show();
  });
}

async function show() {
  const note = byId("usage-note");
  setText(note, "Adding up…");
  const found = await askQuietly("dashboard/usage");
  if (found === null) {
    setText(note, "The usage of this host cannot be read now.");
    return;
  }
  setText(note, "Of this host. Leases that are held count up to now.");
  byId("usage-tables").replaceChildren(...Object.entries(SPANS).map(([name, title]) => table(title, found[name])));
}

function table(title, { people, all, not_shown: more }) {
  if (people.length === 0) return make("p", "empty", `${title}: nothing was used.`);
  const head = make("tr", "", ...COLUMNS.map(heading));
  const rows = people.map((row) => line(row, row.name));
  if (people.length > 1) rows.push(line(all, more ? `all, with ${more} more` : "all"));
  const body = make("table", "usage-table", make("caption", "", title), make("thead", "", head), make("tbody", "", ...rows));
  const scroller = make("div", "usage-scroll", body);
  scroller.tabIndex = 0;
  scroller.setAttribute("role", "region");
  scroller.setAttribute("aria-label", title);
  return scroller;
}

function heading(text) {
  const cell = make("th", "", text);
  cell.scope = "col";
  return cell;
}

function line(row, name) {
  const who = make("th", "", make("bdi", "", name));
  who.scope = "row";
  const idle = row.observed_gpu_hours > 0 ? `${Math.round((100 * row.idle_gpu_hours) / row.observed_gpu_hours)} %` : "?";
  const cells = [
    row.leases,
    row.gpu_hours.toFixed(1),
    idle,
    seconds(row.wait_median_seconds),
    seconds(row.wait_p90_seconds),
    row.refused || "",
  ];
  return make("tr", "", who, ...cells.map((text) => make("td", "", String(text))));
}

function seconds(value) {
  if (value === null) return "";
  if (value < 120) return `${Math.round(value)} s`;
  return value < 7200 ? `${Math.round(value / 60)} min` : `${(value / 3600).toFixed(1)} h`;
}
