// Elements, made and changed without markup: whatever anybody called a worker or a GPU, it can only ever be text.

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
 * phrase`Release ${gpus} of ${name}?`: texts and elements, one element for each value, so that letters which run from
 * right to left, and signs that turn the direction, rearrange none of the words around them. A phrase in it stays one.
 */
export function phrase(words, ...values) {
  return words.flatMap((text, i) => (i < values.length ? [text, ...isolated(values[i])] : [text]));
}

function isolated(value) {
  if (Array.isArray(value)) return value;
  return value === "" ? [] : [make("bdi", "", String(value))];
}

/** A text or a phrase. Touches the page only where something changes: most of it stays as it is from second to second. */
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
 * One child of `parent` for each item, in their order, kept while its key is there. `views` is a Map that the caller
 * keeps; `create(item)` makes `{ element, update(item) }`, and perhaps `remove()`.
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
