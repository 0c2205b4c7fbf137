// Who is looking: the key, kept for this tab only, and requests made with it.
import { byId, say } from "./dom.js";

const STORED = "tuneserve-key";
const ANYBODY = "tml-local";

let wantsKeys = true;
let changed = () => {};

export class Refused extends Error {
  constructor(status, text, retryAfterS) {
    super(text);
    this.status = status;
    this.retryAfterS = retryAfterS;
  }
}

export function key() {
  return sessionStorage.getItem(STORED) ?? (wantsKeys ? null : ANYBODY);
}

// The key as it may be shown: a secret one only by how it begins.
export function shownKey() {
  return wantsKeys ? "tml-…" : key();
}

// Asks the API; raises `Refused` with what it says. Paths are relative, for servers behind a prefix.
export async function ask(path, options = {}) {
  const headers = { ...options.headers, "X-API-Key": key() ?? "" };
  const answer = await fetch(`../${path}`, { ...options, headers, cache: "no-store" });
  if (!answer.ok) {
    const body = await answer.json().catch(() => ({}));
    const text = body.detail ?? body.error?.message ?? `the server answered ${answer.status}`;
    throw new Refused(answer.status, text, Number(answer.headers.get("Retry-After")));
  }
  return answer;
}

// Whether there is a key to begin with; learns whether this server wants one.
export async function begin() {
  const health = await (await fetch("../api/v1/healthz", { cache: "no-store" })).json();
  wantsKeys = Boolean(health.keys_required);
  return key() !== null;
}

export function openDialog(problem = "") {
  const dialog = byId("keys");
  say(byId("keys-title"), wantsKeys ? "API key" : "Tenant");
  say(
    byId("keys-text"),
    wantsKeys
      ? "This server lets in its own keys only. The key stays in this tab and is forgotten with it. The operator makes one with: tuneserve keys create"
      : "Without keys, any text that begins with tml- names a tenant. The page shows all of them; the playground samples as this one.",
  );
  say(byId("key-label"), wantsKeys ? "Key, tml-…" : "Name, tml-…");
  say(byId("key-problem"), problem);
  byId("key").type = wantsKeys ? "password" : "text";
  byId("key").value = wantsKeys ? "" : key();
  byId("key-cancel").hidden = key() === null;
  if (!dialog.open) {
    dialog.showModal();
  }
}

// The server does not take the key: from now on it wants one of its own.
export function forget() {
  sessionStorage.removeItem(STORED);
  wantsKeys = true;
}

// `onChange` is called when there is another key.
export function install(onChange) {
  changed = onChange;
  byId("who").addEventListener("click", () => openDialog());
  byId("key-cancel").addEventListener("click", () => byId("keys").close());
  byId("keys").addEventListener("cancel", (event) => {
    if (key() === null) {
      event.preventDefault(); // there is nothing to see without one
    }
  });
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const given = byId("key").value.trim();
    if (!given.startsWith("tml-")) {
      say(byId("key-problem"), "Keys of this server begin with tml-.");
      return;
    }
    sessionStorage.setItem(STORED, given);
    byId("key").value = "";
    byId("keys").close();
    changed();
  });
}

export const needsKeys = () => wantsKeys;
