// Light or dark: the theme of the system until the user chooses one. Not a module, because it has to
// run before the first paint.
(() => {
  const stored = "tuneserve-theme";
  const system = matchMedia("(prefers-color-scheme: dark)");

  const chosen = () => {
    const kept = localStorage.getItem(stored);
    return kept === "light" || kept === "dark" ? kept : null;
  };

  const apply = () => {
    const theme = chosen() ?? (system.matches ? "dark" : "light");
    const other = theme === "dark" ? "light" : "dark";
    document.documentElement.dataset.theme = theme;
    const button = document.getElementById("theme");
    if (button) {
      button.textContent = other === "dark" ? "Dark" : "Light";
      button.setAttribute("aria-label", `Switch to the ${other} theme`);
    }
    document.dispatchEvent(new Event("theme"));
  };

  apply();
  system.addEventListener("change", apply);
  document.addEventListener("DOMContentLoaded", () => {
    apply();
    document.getElementById("theme").addEventListener("click", () => {
      const dark = document.documentElement.dataset.theme === "dark";
      localStorage.setItem(stored, dark ? "light" : "dark");
      apply();
    });
  });
})();
