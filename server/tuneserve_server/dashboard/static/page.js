// The page: the viewer, the views and their addresses, and the event stream.
import { installAllRuns, showAllRuns } from "./all_runs.js";
import { installCompare, showCompare } from "./compare.js";
import { forgetCurves } from "./curves.js";
import { forgetDevices, showWorkers } from "./device.js";
import { byId, say } from "./dom.js";
import { showPanels } from "./panels.js";
import { forgetLive, showLive } from "./live.js";
import { forgetModels, installPlayground, listModels, showPlayground } from "./playground.js";
import * as route from "./route.js";
import { forgetRun, installRun, refreshRun, showRun } from "./run.js";
import { begin, forget, install, key, needsKeys, openDialog, serverUrl, setTenant, shownKey } from "./session.js";
import { Watch } from "./stream.js";

const STATES = {
  connecting: "connecting",
  live: "live",
  reconnecting: "reconnecting",
  paused: "paused",
  refused: "no access",
};
const TITLES = { overview: "Overview", runs: "Runs", run: "Run", compare: "Compare runs", playground: "Playground" };
const LIST_EVERY = 5; // looks, one per second

let looks = 0;
let maySample = false; // as far as is known

function showState(state, problem = "") {
  const element = byId("state");
  element.dataset.state = state;
  say(element, STATES[state]);
  const notice = byId("notice");
  notice.hidden = !problem || state === "live";
  say(notice, problem);
  if (state === "refused") {
    forget();
    openDialog(problem);
  }
}

function showWho(look) {
  const isAll = look.workers !== undefined;
  setTenant(look.tenant);
  document.body.dataset.sees = isAll ? "all" : "own";
  say(byId("who"), needsKeys() ? look.tenant : key());
  byId("who").setAttribute("aria-label", needsKeys() ? `Tenant ${look.tenant}; change the key` : `Tenant ${key()}; change the tenant`);
  const bases = isAll ? [...new Set(look.workers.map((each) => each.base_model))] : [];
  say(byId("base"), bases.join(", "));
  maySample = look.scopes.includes("sample");
  byId("play").inert = !maySample;
  say(byId("play-note"), maySample ? `as ${needsKeys() ? look.tenant : key()}` : "this key may not sample");
  return isAll;
}

// --- views ----------------------------------------------------------------------------------------

const openView = () => (route.here().view === "runs" && route.here().id ? "run" : route.here().view);

function showData() {
  const { id, query } = route.here();
  const shows = {
    overview: () => {},
    runs: () => showAllRuns(query),
    run: () => showRun(id, query),
    compare: () => showCompare(query),
    playground: () => {
      showPlayground(query);
      if (maySample) {
        listModels();
      }
    },
  };
  if (key() !== null) {
    shows[openView()]();
  }
}

// Shows the view of the address. A new view gets the focus, so that a screen reader follows.
function follow(now, before) {
  const view = openView();
  const isNew = before === null || before.view !== now.view || before.id !== now.id;
  if (isNew) {
    for (const each of document.querySelectorAll("main > .view")) {
      each.hidden = each.id !== `view-${view}`;
    }
    for (const link of document.querySelectorAll("nav a")) {
      const isHere = link.dataset.view === now.view || (link.dataset.view === "runs" && now.view === "compare");
      isHere ? link.setAttribute("aria-current", "page") : link.removeAttribute("aria-current");
    }
    document.title = `${TITLES[view]} · tuneserve`;
  }
  if (isNew && before !== null) {
    scrollTo(0, 0);
    byId(`view-${view}`).querySelector("h2").focus({ preventScroll: true });
  }
  showData();
}

function refresh() {
  const view = openView();
  if (view === "run") {
    refreshRun(route.here().id);
  } else if (looks % LIST_EVERY === 0 && looks > 0 && (view === "runs" || view === "compare")) {
    showData();
  }
  if (maySample && looks % LIST_EVERY === 0 && view === "playground") {
    listModels();
  }
}

function show(look) {
  const isAll = showWho(look);
  const training = showLive(look);
  if (isAll) {
    showWorkers(look.workers);
  }
  showPanels(look.workers ? look : { ...look, workers: [] }, isAll, training);
  refresh();
  looks += 1;
  document.body.dataset.looks = String(looks);
}

const watch = new Watch(show, showState);

function restart() {
  say(
    byId("how"),
    `export TINKER_BASE_URL=${serverUrl()} TINKER_API_KEY=${shownKey()}
# one row per line: {"messages": […]} or {"prompt": "…", "completion": "…"}
tuneserve train my-rows.jsonl`,
  );
  looks = 0;
  maySample = false;
  forgetCurves();
  forgetLive();
  forgetDevices();
  forgetModels();
  forgetRun();
  setTenant(null);
  watch.restart();
  showData();
}

async function open() {
  install(restart);
  installPlayground();
  installAllRuns();
  installCompare();
  installRun();
  route.install(follow);
  byId("skip").addEventListener("click", (event) => {
    event.preventDefault(); // the address names the view
    byId(`view-${openView()}`).querySelector("h2").focus();
  });
  // A page in the background leaves its stream to other viewers.
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) {
      watch.stop();
      showState("paused");
    } else if (key() !== null) {
      showState("connecting");
      watch.resume();
    }
  });
  while (true) {
    try {
      if (await begin()) {
        restart();
      } else {
        showState("refused");
      }
      return;
    } catch {
      showState("reconnecting");
      await new Promise((done) => setTimeout(done, 1000));
    }
  }
}

open();
