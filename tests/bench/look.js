// What is measured within a page; rectangles are in CSS pixels.

const visible = element => {
  const box = element.getBoundingClientRect();
  return (box.width > 0 || box.height > 0) && element.checkVisibility();
};

const parse = colour => {
  const found = colour.match(/[\d.]+/g).map(Number);
  const scale = colour.startsWith("color(srgb") ? 255 : 1;
  return [...found.slice(0, 3).map(value => value * scale), found[3] ?? 1];
};

const over = (top, below) => [0, 1, 2].map(i => top[i] * top[3] + below[i] * (1 - top[3])).concat(1);

const background = element => {
  const layers = [];
  for (let at = element; at; at = at.parentElement) {
    layers.push(parse(getComputedStyle(at).backgroundColor));
    if (layers.at(-1)[3] === 1) break;
  }
  return layers.reduceRight((below, top) => over(top, below), [255, 255, 255, 1]);
};

// WCAG 2.2, relative luminance and contrast ratio
const luminance = colour => {
  const linear = colour.slice(0, 3).map(value => value / 255)
    .map(value => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
  return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
};

const contrast = (a, b) => {
  const [lighter, darker] = [luminance(a), luminance(b)].sort((x, y) => y - x);
  return (lighter + 0.05) / (darker + 0.05);
};

// [text, contrast, contrast needed] of everything that can be read
const texts = () => {
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = walker.nextNode());) {
    const element = node.parentElement;
    if (!node.data.trim() || ["title", "desc"].includes(element.tagName) || !visible(element)) continue;
    const style = getComputedStyle(element), below = background(element);
    const ink = over(parse(element.tagName === "text" ? style.fill : style.color), below);
    const size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && parseInt(style.fontWeight) >= 700);
    found.push([node.data.trim().slice(0, 40), contrast(ink, below), large ? 3 : 4.5]);
  }
  return found;
};

// [class, contrast] of everything that carries a figure
const marks = () =>
  [...document.querySelectorAll(".mark, .dot, .amount, .centre, .interval, .one, .void, .median")]
    .filter(element => element.tagName !== "text" && visible(element))
    .map(element => {
      const style = getComputedStyle(element), below = background(element);
      const inks = [style.fill, style.stroke].filter(colour => colour !== "none");  // a hollow mark is its edge
      return [element.className.baseVal, Math.max(...inks.map(ink => contrast(over(parse(ink), below), below)))];
    });

const apart = (a, b, slack) =>
  a.right < b.left + slack || b.right < a.left + slack || a.bottom < b.top + slack || b.bottom < a.top + slack;

const within = (a, b) =>
  a.left >= b.left - 1 && a.right <= b.right + 1 && a.top >= b.top - 1 && a.bottom <= b.bottom + 1;

// each plot: what is drawn, what is lost, and the texts that can't be read
const plots = () =>
  [...document.querySelectorAll("svg[role=img]")].map(plot => {
    const box = plot.getBoundingClientRect();
    const drawn = [...plot.querySelectorAll("line, rect, circle, path")].map(e => e.getBoundingClientRect());
    const words = [...plot.querySelectorAll("text")];
    const boxes = new Map(words.map(element => [element, element.getBoundingClientRect()]));
    const clash = (a, b) => !apart(boxes.get(a), boxes.get(b), 3);
    return {
      id: plot.id,
      width: box.width,
      height: box.height,
      marks: drawn.filter(each => each.width > 0.5 || each.height > 0.5).length,
      lost: drawn.filter(each => apart(each, box, 0)).length,
      outside: words.filter(each => !within(boxes.get(each), box)).map(each => each.textContent),
      overlapping: words.flatMap((a, i) => words.slice(i + 1).filter(b => clash(a, b))
        .map(b => [a.textContent, b.textContent])),
    };
  });
