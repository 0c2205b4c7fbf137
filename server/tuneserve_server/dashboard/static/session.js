// The viewer: the key, kept for this tab only, and requests that carry it.
import { byId, say } from "./dom.js";

const STORED = "tuneserve-key";
const ANYBODY = "tml-local";

let wantsKeys = true;
let changed = () => {};
let tenant = null; // of the key, once the stream has told

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

export const tenantOfKey = () => tenant;

// The address of the server for clients and commands; a proxy may serve it under a path.
export const serverUrl = () => new URL("..", location.href).href.replace(/\/$/, "");

export function setTenant(name) {
  tenant = name;
}

// The key for display: of a secret key, only the prefix.
export function shownKey() {
  return wantsKeys ? "tml-…" : key();
}

// Sends a request to the API; throws `Refused` with its text. Relative paths work behind a prefix.
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

export const askJson = async (path, options) => (await ask(path, options)).json();

// Sends a JSON body and returns the answer's.
export const sendJson = (method, path, body) =>
  askJson(path, { method, headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });

// Asks whether this server wants a key, and returns whether this tab has one.
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
      ? "This server accepts only keys that its operator created with: tuneserve keys create. Your key stays in this tab until you close it."
      : "Without keys, any text that starts with tml- names a tenant. The dashboard shows all tenants; the playground samples as this one.",
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

// Drops a key that the server refused: from now on, the server wants one of its own keys.
export function forget() {
  sessionStorage.removeItem(STORED);
  tenant = null;
  wantsKeys = true;
}

// Installs the dialog; `onChange` is called when the key changes.
export function install(onChange) {
  changed = onChange;
  byId("who").addEventListener("click", () => openDialog());
  byId("key-cancel").addEventListener("click", () => byId("keys").close());
  byId("keys").addEventListener("cancel", (event) => {
    if (key() === null) {
      event.preventDefault(); // without a key, there is nothing to show
    }
  });
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const given = byId("key").value.trim();
    if (!given.startsWith("tml-")) {
      say(byId("key-problem"), "Keys of this server start with tml-.");
      return;
    }
    sessionStorage.setItem(STORED, given);
    byId("key").value = "";
    byId("keys").close();
    changed();
  });
}

export const needsKeys = () => wantsKeys;
