// The statistics of a tensor, and its histogram.

function valuesOf(stats, dtype) {
  const value = written(dtype);
  const facts = [
    ["values", grouped(stats.count)],
    ["min", value(stats.min)],
    ["max", value(stats.max)],
    ["mean", real(stats.mean)],
    ["std", real(stats.std)],
    ["NaN", grouped(stats.nan)],
    ["Inf", grouped(stats.inf)],
  ];
  const found = element("div", {}, factList(facts));
  if (stats.histogram.length > 0) found.append(histogram(stats, value));
  return found;
}

function factList(facts) {
  return element(
    "dl",
    { class: "facts" },
    facts.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))),
  );
}

function histogram(stats, value) {
  const holder = element("div", { class: "histogram" });
  const draw = (log) => holder.replaceChildren(bars(stats, log));
  const box = element("input", { type: "checkbox", change: () => draw(box.checked) });
  draw(false);
  const ends = element("div", { class: "ends dim" }, element("span", {}, value(stats.min)), element("span", {}, value(stats.max)));
  return element("div", {}, holder, ends, element("label", { class: "choice" }, box, " logarithmic counts"));
}

function bars(stats, log) {
  const counts = stats.histogram;
  const height = (count) => (log ? Math.log10(Number(count) + 1) : Number(count));
  const most = Math.max(...counts.map(height));
  const [low, high] = [Number(stats.min), Number(stats.max)];
  const step = (high - low) / counts.length;
  const picture = drawing("svg", {
    viewBox: `0 0 ${counts.length} 30`,
    preserveAspectRatio: "none",
    role: "img",
    "aria-label": `Histogram with ${counts.length} bins from ${real(low)} to ${real(high)}`,
  });
  counts.forEach((count, index) => {
    const tall = most > 0 ? (28 * height(count)) / most : 0;
    const from = low + index * step;
    const lines = () => [`${real(from)} to ${real(from + step)}`, counted(count, "value")];
    const ground = drawing("rect", { class: "back", x: index, y: 0, width: 1, height: 30 });
    picture.append(withTip(ground, lines));
    picture.append(drawing("rect", { class: "bar-value", x: index + 0.06, y: 30 - tall, width: 0.88, height: tall }));
  });
  return picture;
}
