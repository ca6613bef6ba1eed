// Makes and changes elements without markup, so that names from the server can only ever be text.

export function byId(id) {
  return document.getElementById(id);
}

/** `make("li", "waiter", child, "text")`: a class, then elements or texts. */
export function make(tag, className, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children);
  return element;
}

export function makeButton(text, onClick) {
  const button = make("button", "", text);
  button.type = "button";
  button.addEventListener("click", onClick);
  return button;
}

/**
 * phrase`Release ${gpus} of ${name}?`: texts and elements, one element for each value, so that right-to-left text in a
 * value does not rearrange the words around it. Phrases can be nested.
 */
export function phrase(words, ...values) {
  return words.flatMap((text, i) => (i < values.length ? [text, ...isolated(values[i])] : [text]));
}

function isolated(value) {
  if (Array.isArray(value)) return value;
  return value === "" ? [] : [make("bdi", "", String(value))];
}

/** `words` is a text or a phrase. Touches the page only if it changes. */
export function setText(element, words) {
  const parts = Array.isArray(words) ? words : [words];
  const text = parts.map((part) => part.textContent ?? part).join("");
  if (element.shownText !== text) {
    element.shownText = text;
    element.replaceChildren(...parts);
  }
}

export function setAttribute(element, name, value) {
  if (value === null) {
    if (element.hasAttribute(name)) element.removeAttribute(name);
  } else if (element.getAttribute(name) !== value) {
    element.setAttribute(name, value);
  }
}

export function setHidden(element, isHidden) {
  if (element.hidden !== isHidden) element.hidden = isHidden;
}

/**
 * Shows one child of `parent` for each item, in their order, and reuses it while its key exists. `views` is a Map that
 * the caller stores; `create(item)` makes `{ element, update(item) }`, and perhaps `remove()`.
 */
export function showEach(parent, views, items, keyOf, create) {
  const keys = new Set();
  let after = null;
  for (const item of items) {
    const key = keyOf(item);
    if (keys.has(key)) continue;
    keys.add(key);
    let view = views.get(key);
    if (view === undefined) {
      view = create(item);
      views.set(key, view);
    }
    view.update(item);
    const wanted = after === null ? parent.firstElementChild : after.nextElementSibling;
    if (wanted !== view.element) parent.insertBefore(view.element, wanted);
    after = view.element;
  }
  for (const [key, view] of views) {
    if (keys.has(key)) continue;
    views.delete(key);
    view.remove?.();
    view.element.remove();
  }
}
