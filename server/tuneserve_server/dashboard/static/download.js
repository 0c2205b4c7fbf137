// Files made by the page, and texts for the clipboard.
import { make, say } from "./dom.js";

function save(blob, name) {
  const address = URL.createObjectURL(blob);
  make("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

const safe = (name) => name.replace(/[^\p{L}\p{N}._-]+/gu, "-").replace(/^[-.]+|-+$/g, "").slice(0, 60) || "run";

export const saveCsv = (text, name) => save(new Blob([text], { type: "text/csv" }), `${safe(name)}.csv`);

export const savePng = (canvas, name) => canvas?.toBlob((blob) => blob && save(blob, `${safe(name)}.png`), "image/png");

// A command with a button that copies it. Without a clipboard (plain HTTP), the button selects it.
export function copyable(text) {
  const code = make("code", {}, text);
  const button = make("button", { type: "button", class: "small", "aria-label": `Copy: ${text}` }, "Copy");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      say(button, "Copied");
    } catch {
      getSelection().selectAllChildren(code);
      say(button, "Selected");
    }
    setTimeout(() => say(button, "Copy"), 2000);
  });
  return make("div", { class: "copyable" }, code, button);
}
