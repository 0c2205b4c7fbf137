// Creates and changes elements. Tenants choose some of the text, so it is never set as HTML.

export const byId = (id) => document.getElementById(id);

export function make(tag, attributes = {}, ...children) {
  const svg = tag === "svg" || tag === "path" || tag === "line";
  const found = svg
    ? document.createElementNS("http://www.w3.org/2000/svg", tag)
    : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    found.setAttribute(name, value);
  }
  found.append(...children);
  return found;
}

// Sets the text only if it differs, so screen readers do not announce it again.
export function say(element, text) {
  if (element.textContent !== text) {
    element.textContent = text;
  }
}

// Makes the children of `parent` match `items`, in order, and reuses the elements of known items. A key
// stands for all that `create` shows and `update` does not set.
export function keyed(parent, items, keyOf, create, update) {
  const known = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  const gone = new Set(parent.children);
  let place = parent.firstElementChild;
  for (const item of items) {
    const key = String(keyOf(item));
    let child = known.get(key);
    if (child) {
      known.delete(key);
      gone.delete(child);
    } else {
      child = create(item);
      child.dataset.key = key;
    }
    if (child === place) {
      place = place.nextElementSibling;
    } else {
      parent.insertBefore(child, place);
    }
    update(child, item);
  }
  for (const child of gone) {
    child.remove(); // of two with the same key, one is made anew
  }
}

// The child with this class.
export const part = (element, name) => element.querySelector(`.${name}`);

// A cell of a table that becomes a card on a phone, where `label` stands before its value. The roles
// stay when the layout changes.
export function cell(name, label, ...classes) {
  const found = make("td", { class: name, role: "cell" }, make("span", { class: "value" }));
  found.classList.add(...classes);
  found.dataset.label = label;
  return found;
}

// Sets the value of a cell.
export const fill = (row, name, text) => say(part(row, name).firstElementChild, text);
