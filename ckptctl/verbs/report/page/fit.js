// Memory for inference: what each GPU holds, and what fits.

function fit(report) {
  const found = report.fit;
  if (!found) return;
  const size = (value) => (value === null ? "unknown" : bytes(value));
  const count = (value) => (value === null ? "unknown" : grouped(value));
  const answer = found.fits === null ? "It is unknown whether the model fits." : found.fits ? "The model fits." : "The model does not fit.";
  const sizes = found.stages.flatMap((stage) => [stage.weights, stage.token_bytes]);
  const unlimited = found.max_context === null && !sizes.includes(null);
  const facts = [
    ["GPUs", `${grouped(found.gpus)} × ${bytes(found.memory)}`],
    ["parallel", ["tp", "pp", "ep", "dp"].map((name) => `${name} ${found[name]}`).join(", ")],
    ["weights", bytes(found.weights)],
    ["KV cache dtype", found.kv_dtype || "unknown"],
    ["tokens per request", count(found.context)],
    ["cache per token", size(found.token_bytes)],
    ["cache per request", size(found.request_bytes)],
    ["requests that fit", count(found.requests)],
    ["longest request", unlimited ? "unlimited" : found.max_context === null ? "unknown" : counted(found.max_context, "token")],
  ];
  const stages = plainTable("Memory of each GPU", ["stage", "layers", "weights", "cache per token", "cache per request"],
    found.stages.map((stage, number) => [String(number), count(stage.layers), size(stage.weights), size(stage.token_bytes), size(stage.request_bytes)]));
  const kinds = plainTable("Cache of one request", ["layers of kind", "layers", "window", "per token", "state", "total"],
    (found.cache || []).map((use) => [use.kind, grouped(use.layers), use.window === null ? "" : grouped(use.window), bytes(use.token_bytes), bytes(use.state_bytes), size(use.bytes)]));
  const unknown = found.unknown.map((reason) => element("p", { class: "note" }, prose(reason)));
  const rest = element("p", { class: "dim" }, "Activations, CUDA graphs and the program itself need further memory.");
  section("fit", "Memory for inference", element("p", {}, answer), factList(facts), unknown, stages, found.cache ? kinds : null, rest);
}

function plainTable(caption, titles, rows) {
  const cell = (value, index) => (index === 0 ? element("th", { scope: "row" }, value) : element("td", { class: "number" }, value));
  const heads = titles.map((title, index) => element("th", { scope: "col", class: index ? "number" : null }, title));
  const body = rows.map((row) => element("tr", {}, row.map(cell)));
  const table = element("table", { class: "plain" }, element("caption", {}, caption), element("thead", {}, element("tr", {}, heads)), element("tbody", {}, body));
  return element("div", { class: "sideways" }, table);
}
