// Draws the page.

function main() {
  const report = JSON.parse(document.getElementById("data").textContent);
  const open = detailsOf(report);
  document.title = visible(`${report.path}: ckptctl report`);
  summary(report);
  findings(report, open);
  difference(report, open);
  if (report.tensors.length > 0) treemap(report, open);
  dtypes(report);
  files(report);
  tensorTable(report, open);
  document.getElementById("sections").append(
    element("footer", { class: "dim" }, `Written by ckptctl ${report.ckptctl} (${report.schema}).`),
  );
  const named = /^#tensor=(.+)$/.exec(location.hash);
  if (named) open(decodeURIComponent(named[1]));
}

main();
