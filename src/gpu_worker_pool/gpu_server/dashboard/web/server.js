// Asking the server that this page came from, and no other.

/** Where its routes begin, also behind a proxy that adds a path: this file is at dashboard/files/server.js. */
const ROOT = new URL("../../", import.meta.url);

const PATIENCE_MILLISECONDS = 10_000;

export function address(path) {
  return new URL(path, ROOT).href;
}

/** What it says, as `{ status, body, bytes }`; throws where it says nothing in time. */
export async function ask(path, options = {}) {
  const response = await fetch(address(path), {
    cache: "no-store",
    credentials: "same-origin",
    redirect: "error",
    signal: AbortSignal.timeout(PATIENCE_MILLISECONDS),
    ...options,
  });
  const text = await response.text();
  let body = null;
  try {
    body = JSON.parse(text);
  } catch {
    // A proxy's error page, for example: the status says enough.
  }
  return { status: response.status, body, bytes: text.length };
}

/** The body of a good answer, or null: for what can be shown without. */
export async function askQuietly(path) {
  try {
    const answer = await ask(path);
    return answer.status === 200 ? answer.body : null;
  } catch {
    return null;
  }
}
