// Requests to the server that this page came from.

/** Where its routes begin, also behind a proxy that adds a path: this file is at dashboard/files/server.js. */
const ROOT = new URL("../../", import.meta.url);

const TIMEOUT_MILLISECONDS = 10_000;

export function address(path) {
  return new URL(path, ROOT).href;
}

/** The answer as `{ status, body, bytes }`; throws if there is none in time. */
export async function ask(path, options = {}) {
  const response = await fetch(address(path), {
    cache: "no-store",
    credentials: "same-origin",
    redirect: "error",
    signal: AbortSignal.timeout(TIMEOUT_MILLISECONDS),
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

/** The body of a good answer, or null: for optional data. */
export async function askQuietly(path) {
  try {
    const answer = await ask(path);
    return answer.status === 200 ? answer.body : null;
  } catch {
    return null;
  }
}
