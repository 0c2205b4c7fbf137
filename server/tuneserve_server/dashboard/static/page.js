// The page: the viewer, the event stream, and the panels that show it.
import { forgetCurves } from "./curves.js";
import { forgetDevices, showWorkers } from "./device.js";
import { byId, say } from "./dom.js";
import { showPanels } from "./panels.js";
import { forgetModels, installPlayground, listModels } from "./playground.js";
import { forgetLooks, showRuns } from "./runs.js";
import { begin, forget, install, key, needsKeys, openDialog, shownKey } from "./session.js";
import { Watch } from "./stream.js";

const STATES = {
  connecting: "connecting",
  live: "live",
  reconnecting: "reconnecting",
  paused: "paused",
  refused: "no access",
};
const LIST_EVERY = 10; // looks, one per second

let looks = 0;

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
  document.body.dataset.sees = isAll ? "all" : "own";
  say(byId("who"), needsKeys() ? look.tenant : key());
  byId("who").setAttribute("aria-label", needsKeys() ? `Tenant ${look.tenant}; change the key` : `Tenant ${key()}; change the tenant`);
  const bases = isAll ? [...new Set(look.workers.map((each) => each.base_model))] : [];
  say(byId("base"), bases.join(", "));
  const mayingSample = look.scopes.includes("sample");
  byId("play").inert = !mayingSample;
  say(byId("play-note"), mayingSample ? `as ${needsKeys() ? look.tenant : key()}` : "this key may not sample");
  return [isAll, mayingSample];
}

function show(look) {
  const [isAll, mayingSample] = showWho(look);
  const training = showRuns(look);
  if (isAll) {
    showWorkers(look.workers);
  }
  showPanels(look.workers ? look : { ...look, workers: [] }, isAll, training);
  if (mayingSample && looks % LIST_EVERY === 0) {
    listModels();
  }
  looks += 1;
  document.body.dataset.looks = String(looks);
}

const watch = new Watch(show, showState);

function restart() {
  say(
    byId("how"),
    `export TINKER_BASE_URL=${location.origin} TINKER_API_KEY=${shownKey()}
# one row per line: {"messages": […]} or {"prompt": "…", "completion": "…"}
tuneserve train my-rows.jsonl`,
  );
  looks = 0;
  forgetCurves();
  forgetLooks();
  forgetDevices();
  forgetModels();
  watch.restart();
}

async function open() {
  install(restart);
  installPlayground();
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
