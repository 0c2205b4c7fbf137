// The address bar: which view is open and its state, as `#/view/part?name=value`.

const VIEWS = new Set(["overview", "runs", "compare", "playground"]);

// Parses a hash such as "#/runs/ID?x=time": { view, id, query }. Null if it is not an address.
export function parse(hash) {
  if (hash !== "" && !hash.startsWith("#/")) {
    return null;
  }
  const [path, search = ""] = hash.slice(2).split(/\?(.*)/s);
  const [view, ...rest] = path.split("/");
  const query = Object.fromEntries(new URLSearchParams(search));
  let id = "";
  try {
    id = decodeURIComponent(rest.join("/"));
  } catch {
    id = rest.join("/"); // a broken escape is looked up as it stands
  }
  return { view: VIEWS.has(view) ? view : "overview", id, query };
}

// The hash of an address; empty values are left out.
export function format(view, id = "", query = {}) {
  const kept = Object.entries(query).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const search = new URLSearchParams(kept.map(([name, value]) => [name, String(value)])).toString();
  return `#/${view}${id ? `/${encodeURIComponent(id)}` : ""}${search ? `?${search}` : ""}`;
}

let current = parse("");
let followed = null;
let follow = () => {};

export const here = () => current;

export function go(view, id = "", query = {}) {
  location.hash = format(view, id, query);
}

// Changes parts of the query. Typing replaces the entry of the history; a choice adds one.
export function change(parts, { isTyping = false } = {}) {
  const query = { ...current.query, ...parts };
  const hash = format(current.view, current.id, query);
  if (hash === format(current.view, current.id, current.query)) {
    return;
  }
  history[isTyping ? "replaceState" : "pushState"](null, "", hash);
  read();
}

function read() {
  const found = parse(location.hash);
  const hash = found && format(found.view, found.id, found.query);
  if (!found || hash === followed) {
    return; // a link tells of it by two events
  }
  const before = followed === null ? null : current;
  followed = hash;
  current = found;
  follow(current, before);
}

// Calls `onRoute` with the new and the old address now and on each change.
export function install(onRoute) {
  follow = onRoute;
  window.addEventListener("hashchange", read);
  window.addEventListener("popstate", read);
  read();
}
