// The device of each worker: its load, its throughput and its memory plan.
import { byId, keyed, make, part, say } from "./dom.js";
import { bytes, count, percent, short } from "./format.js";

const KEPT = 120; // looks, one per second
const MEMORY = [
  ["memory_base_model_bytes", "base model", "--fill-1"],
  ["memory_training_bytes", "training", "--fill-2"],
  ["memory_sampling_bytes", "sampling", "--fill-3"],
  ["memory_adapters_bytes", "adapters", "--fill-4"],
  ["memory_free_bytes", "kept free", "--fill-free"],
];
const FACTS = [
  ["trained", "Trained"],
  ["sampled", "Sampled"],
  ["padding", "Padding"],
  ["flops", "Model FLOPs"],
  ["programs", "Programs"],
  ["late", "Recompiled"],
  ["adapters", "Adapters"],
  ["overhead", "Overhead"],
];

const histories = new Map();

export function forgetDevices() {
  histories.clear();
}

export const busyOf = (worker) => {
  const rate = worker.rates.device_seconds_total;
  return rate === undefined ? null : Math.min(rate, 1);
};

function padding(worker) {
  const of = worker.rates.tokens_computed_total ? worker.rates : worker.figures;
  return of.tokens_computed_total ? 1 - of.tokens_trained_total / of.tokens_computed_total : null;
}

// The utilisation of the device, if the operator has set its peak; else the rate.
function flops(worker) {
  const rate = worker.rates.model_flops_total;
  const peak = worker.figures.device_peak_flops;
  if (rate === undefined) {
    return ["–", ""];
  }
  return peak
    ? [percent(rate / peak), `utilised: ${short(rate, "FLOP/s")} of ${short(peak, "FLOP/s")}`]
    : [short(rate, "FLOP/s"), "set device_peak_flops for a share"];
}

function makeWorker() {
  const facts = FACTS.map(([name, title]) =>
    make(
      "div",
      {},
      make("dt", {}, title),
      make("dd", {}, make("span", { class: name }), make("small", { class: `${name}-note` })),
    ),
  );
  const parts = MEMORY.map(([, , colour]) => {
    const bar = make("span", { class: "share" });
    bar.style.background = `var(${colour})`;
    return bar;
  });
  const keys = MEMORY.map(([, title, colour]) => {
    const dot = make("span", { class: "dot", "aria-hidden": "true" });
    dot.style.background = `var(${colour})`;
    return make("li", {}, dot, `${title} `, make("span", { class: "size" }));
  });
  return make(
    "div",
    { class: "worker" },
    make("h3", { class: "worker-name" }),
    make(
      "div",
      { class: "busy-row" },
      make("p", { class: "busy" }),
      make(
        "svg",
        { class: "spark", viewBox: `0 0 ${KEPT - 1} 30`, preserveAspectRatio: "none", role: "img" },
        make("path", { class: "spark-area" }),
        make("path", { class: "spark-line" }),
      ),
    ),
    make("dl", { class: "facts" }, ...facts),
    make(
      "div",
      { class: "memory" },
      make("h4", {}, "Memory plan ", make("span", { class: "memory-total quiet" })),
      make("div", { class: "stack", "aria-hidden": "true" }, ...parts),
      make("ul", { class: "keys" }, ...keys),
    ),
  );
}

function drawSpark(element, history, title) {
  const svg = part(element, "spark");
  const start = KEPT - history.length;
  const line = history.map((busy, index) => `${index ? "L" : "M"}${start + index} ${29 - 28 * busy}`).join("");
  part(svg, "spark-line").setAttribute("d", line);
  part(svg, "spark-area").setAttribute("d", line && `${line}L${KEPT - 1} 30L${start} 30Z`);
  svg.setAttribute("aria-label", `Device use in the last ${KEPT} s; now ${title}`);
}

function updateMemory(element, figures) {
  const total = MEMORY.reduce((sum, [name]) => sum + (figures[name] ?? 0), 0);
  part(element, "memory").hidden = !total;
  if (!total) {
    return;
  }
  say(part(element, "memory-total"), bytes(total));
  const bars = element.querySelectorAll(".share");
  const sizes = element.querySelectorAll(".size");
  MEMORY.forEach(([name], index) => {
    bars[index].style.width = `${(100 * (figures[name] ?? 0)) / total}%`;
    say(sizes[index], bytes(figures[name] ?? 0));
  });
}

function update(element, worker) {
  const { figures, rates } = worker;
  const of = (name) => figures[name] ?? 0;
  const busy = busyOf(worker);
  const history = histories.get(keyOf(worker)) ?? [];
  if (busy !== null) {
    history.push(busy);
    histories.set(keyOf(worker), history.slice(-KEPT));
  }
  say(part(element, "worker-name"), [worker.base_model, worker.name].filter(Boolean).join(", "));
  say(part(element, "busy"), `${percent(busy)} busy`);
  drawSpark(element, histories.get(keyOf(worker)) ?? [], percent(busy));
  const put = (name, text, note = "") => {
    say(part(element, name), text);
    say(part(element, `${name}-note`), note);
  };
  put("trained", short(rates.tokens_trained_total, "tok/s"), `${short(of("tokens_trained_total"))} in total`);
  put("sampled", short(rates.tokens_sampled_total, "tok/s"), `${short(of("tokens_sampled_total"))} in total`);
  put("padding", percent(padding(worker)), "of the tokens computed");
  put("flops", ...flops(worker));
  put("programs", `${count(of("programs_compiled"))} of ${count(of("programs"))}`, of("programs_failed") ? `${count(of("programs_failed"))} cannot be compiled` : "compiled");
  put("late", count(of("compilations_after_ready_total")), "programs after ready; 0 expected");
  put("adapters", `${count(of("adapters_on_device"))} of ${count(of("adapters"))}`, "on the device");
  const seconds = of("device_seconds_total");
  put("overhead", percent(seconds ? of("device_seconds_overhead_total") / seconds : 0), "of device time: replay, failed passes");
  element.querySelector(".late").dataset.tone = of("compilations_after_ready_total") ? "warn" : "";
  updateMemory(element, figures);
}

const keyOf = (worker) => `${worker.base_model} ${worker.name}`;

export function showWorkers(workers) {
  keyed(byId("workers"), workers, keyOf, makeWorker, update);
  if (!workers.length) {
    byId("workers").replaceChildren(make("p", { class: "quiet", "data-key": "none" }, "No worker is connected."));
  }
}
