// Tenants, the store, recent errors, and the tiles at the top.
import { busyOf } from "./device.js";
import { byId, keyed, make, part, say } from "./dom.js";
import { ago, count, percent, seconds, short } from "./format.js";

const DURABLE = {
  always: "on disk before a request is accepted",
  asserted: "by the operator's word",
};

// --- tenants --------------------------------------------------------------------------------------

function makeTenant() {
  return make(
    "li",
    {},
    make("span", { class: "tenant-name" }),
    make("span", { class: "tenant-share number" }),
    make("span", { class: "track", "aria-hidden": "true" }, make("span", { class: "bar" })),
    make("span", { class: "tenant-note quiet" }),
  );
}

function updateTenant(element, tenant, of, isAll) {
  const share = of ? (tenant.device_rate ?? 0) / of : 0;
  const bar = part(element, "bar");
  bar.style.width = `${100 * Math.min(share, 1)}%`;
  say(part(element, "tenant-name"), tenant.name);
  say(part(element, "tenant-share"), isAll && !of ? "–" : percent(share));
  const parts = [
    `${seconds(tenant.device_s)} of device time today`,
    `${short(tenant.trained_tokens)} trained`,
    `${short(tenant.sampled_tokens)} sampled`,
    tenant.unfinished ? `${count(tenant.unfinished)} in the queue` : "queue empty",
  ];
  say(part(element, "tenant-note"), parts.join(" · "));
}

function showTenants(look, isAll) {
  // With all tenants in view: shares of their total use. With one tenant: its share of elapsed time.
  const used = look.tenants.reduce((sum, each) => sum + (each.device_rate ?? 0), 0);
  say(byId("tenants-title"), isAll ? "Tenants" : "Your usage");
  say(byId("tenants-note"), isAll ? "share of the device time used, last 20 s" : "share of the device's time, last 20 s");
  keyed(byId("tenants"), look.tenants, (each) => each.name, makeTenant, (element, each) =>
    updateTenant(element, each, isAll ? used : 1, isAll),
  );
}

// --- the store ------------------------------------------------------------------------------------

function showStore(store) {
  const facts = [
    ["Kind", store.kind === "sqlite" ? "SQLite" : "Redis", ""],
    ["Durability", store.durability, DURABLE[store.durability] ?? ""],
    ["Log", count(store.logged), "requests kept for replay if a worker dies"],
    ["Recovery points", count(store.recovery_points), "saved states from which replay starts"],
    ["Queue", count(store.unfinished), "unfinished requests"],
    ["Disk", store.disk === "ok" ? "ok" : "full", store.disk === "ok" ? "" : store.disk],
  ];
  const create = ([title]) =>
    make("div", {}, make("dt", {}, title), make("dd", {}, make("span", { class: "value" }), make("small", {})));
  keyed(byId("store"), facts, ([title]) => title, create, (element, [, value, note]) => {
    say(part(element, "value"), value);
    say(element.querySelector("small"), note);
  });
}

// --- errors ---------------------------------------------------------------------------------------

function makeError() {
  return make(
    "li",
    {},
    make("p", { class: "error-head" }, make("code", { class: "error-code" }), make("span", { class: "error-note quiet" })),
    make("p", { class: "error-text" }),
  );
}

function showErrors(look, isAll) {
  byId("errors-none").hidden = look.errors.length > 0;
  const keyOf = (each) => JSON.stringify([each.tenant, each.code, each.where, each.text]);
  keyed(byId("errors"), look.errors, keyOf, makeError, (element, each) => {
    say(part(element, "error-code"), each.code);
    say(part(element, "error-text"), each.text);
    const parts = [ago(look.now_s - each.time_s), each.where];
    if (each.count > 1) {
      parts.unshift(`${count(each.count)} times, last`);
    }
    if (isAll && each.tenant) {
      parts.push(each.tenant);
    }
    say(part(element, "error-note"), parts.filter(Boolean).join(" · ").replace("last · ", "last "));
  });
}

// --- at a glance ----------------------------------------------------------------------------------

function showTiles(look, isAll, training) {
  const total = (name) => {
    const rates = look.workers.map((each) => each.rates[name]).filter((each) => each !== undefined);
    return rates.length ? rates.reduce((sum, each) => sum + each, 0) : null;
  };
  const own = look.tenants[0];
  const queue = look.tenants.reduce((sum, each) => sum + each.unfinished, 0);
  const tiles = [["Runs training", count(training), `of ${look.runs.length} shown`]];
  if (isAll) {
    const busy = look.workers.map(busyOf).filter((each) => each !== null);
    const mean = busy.length ? busy.reduce((sum, each) => sum + each, 0) / busy.length : null;
    const workers = look.workers.length;
    tiles.push(
      ["Device busy", percent(mean), workers === 1 ? "1 worker" : `${workers} workers`],
      ["Trained", short(total("tokens_trained_total")), "tokens per second"],
      ["Sampled", short(total("tokens_sampled_total")), "tokens per second"],
      ["Tenants", count(look.tenants.length), "today"],
    );
  } else if (own) {
    tiles.push(
      ["Device time", seconds(own.device_s), "today (UTC)"],
      ["Trained", short(own.trained_tokens), "tokens today"],
      ["Sampled", short(own.sampled_tokens), "tokens today"],
    );
  }
  tiles.push(["Queue", count(queue), "requests"]);
  const create = ([title]) =>
    make("li", {}, make("span", { class: "tile-title" }, title), make("strong", {}), make("span", { class: "tile-note" }));
  keyed(byId("tiles"), tiles, ([title]) => title, create, (element, [, value, note]) => {
    say(element.querySelector("strong"), value);
    say(part(element, "tile-note"), note);
  });
}

export function showPanels(look, isAll, training) {
  showTiles(look, isAll, training);
  showTenants(look, isAll);
  showErrors(look, isAll);
  if (isAll) {
    showStore(look.store);
  }
}
