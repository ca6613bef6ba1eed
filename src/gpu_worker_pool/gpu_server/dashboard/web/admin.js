// Releases leases and removes waiting requests with an administrator's key, each after a confirmation. The key is only
// stored in a variable of this file.

import { byId, phrase, setHidden, setText } from "./dom.js";
import { ask } from "./server.js";
import { gpuNames, nameOf } from "./words.js";

let key = null;
let changed = () => {};

export function isAdministrator() {
  return key !== null;
}

/** `onChange` is called when buttons are to appear or to vanish; `say(words)` speaks to screen readers. */
export function offerAdministration(onChange, say) {
  changed = onChange;
  const dialog = byId("key-dialog");
  const input = byId("key-input");
  setHidden(byId("key-warning"), window.isSecureContext);
  byId("key-button").addEventListener("click", () => {
    if (key !== null) {
      forget();
      say("The key is forgotten.");
      return;
    }
    setText(byId("key-problem"), "");
    dialog.showModal();
    input.focus();
  });
  byId("key-cancel").addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => {
    input.value = "";
  });
  byId("key-form").addEventListener("submit", async (event) => {
    event.preventDefault();
    const tried = input.value.trim();
    const problem = await problemWith(tried);
    setText(byId("key-problem"), problem ?? "");
    if (problem !== null) {
      input.select();
      return;
    }
    key = tried;
    dialog.close();
    setText(byId("key-button"), "Forget the key");
    changed();
    say("You can release leases and remove waiting requests.");
  });
}

function forget() {
  key = null;
  setText(byId("key-button"), "Admin key…");
  changed();
}

/** Tries to release a lease that does not exist: the status shows whether the key is accepted. */
async function problemWith(tried) {
  if (!/^[!-~]+$/.test(tried)) return "A key consists of ASCII characters without blanks.";
  try {
    const { status, body } = await remove("leases/no-such-lease", tried);
    if (status === 404) return null;
    if (status === 403) return "This key is not an administrator's: it cannot release the leases of others.";
    return body?.detail ?? `The server answered with ${status}.`;
  } catch {
    return "The server does not answer. Try again later.";
  }
}

function remove(path, withKey) {
  return ask(path, { method: "DELETE", headers: { Authorization: `Bearer ${withKey}` } });
}

/** For cards: `ask(lease)` releases it after a confirmation. */
export function makeRelease(say) {
  return {
    isPossible: isAdministrator,
    ask: (lease) => {
      const what = gpuNames(lease.gpus);
      const isQuarantined = lease.state === "quarantined";
      confirm({
        title: isQuarantined ? `End the quarantine of ${what}?` : phrase`Release ${what} of ${nameOf(lease)}?`,
        text: isQuarantined
          ? "It may be granted to another program at once. If the old program still uses it, both will share it."
          : phrase`${described(lease)}The program is not stopped: it uses the GPU until it notices that it has lost the lease, and the GPU may be granted to another program in the meantime.`,
        yes: isQuarantined ? "End the quarantine" : "Release it",
        path: `leases/${encodeURIComponent(lease.lease_id)}`,
        done: () => say(phrase`${what} of ${nameOf(lease)} ${lease.gpus?.length > 1 ? "were" : "was"} released.`),
      });
    },
  };
}

export function makeRemoval(say) {
  return {
    isPossible: isAdministrator,
    ask: (row) =>
      confirm({
        title: phrase`Remove ${nameOf(row)} from the queue?`,
        text: phrase`${described(row)}Its request is cancelled, and its program gets an error.`,
        yes: "Remove it",
        path: `queue/${encodeURIComponent(row.request_id)}`,
        done: () => say(phrase`${nameOf(row)} was removed from the queue.`),
      }),
  };
}

function described(row) {
  return row.label ? phrase`It says: “${row.label}”. ` : "";
}

function confirm({ title, text, yes, path, done }) {
  const dialog = byId("confirm-dialog");
  const button = byId("confirm-yes");
  setText(byId("confirm-title"), title);
  setText(byId("confirm-text"), text);
  setText(byId("confirm-problem"), "");
  setText(button, yes);
  byId("confirm-no").onclick = () => dialog.close();
  button.onclick = async () => {
    button.disabled = true;
    const problem = await attempt(path);
    button.disabled = false;
    if (problem !== null) {
      setText(byId("confirm-problem"), problem);
      return;
    }
    dialog.close();
    // The focused button is about to vanish.
    byId("gpus-title").focus({ preventScroll: true });
    done();
  };
  dialog.showModal();
  byId("confirm-no").focus();
}

async function attempt(path) {
  try {
    const { status, body } = await remove(path, key);
    if (status === 401) forget();
    return status === 200 ? null : (body?.detail ?? `The server answered with ${status}.`);
  } catch {
    return "The server does not answer. Probably nothing was changed.";
  }
}
