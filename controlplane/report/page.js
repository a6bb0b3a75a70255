"use strict";
// Filters the commands, and opens or closes all of them. The page is complete without it.
(() => {
  const steps = [...document.querySelectorAll("details.step")];
  const words = document.getElementById("words");
  const bad = document.getElementById("bad");
  const found = document.getElementById("found");
  const narrow = () => {
    const wanted = words.value.trim().toLowerCase();
    let count = 0;
    for (const step of steps) {
      let shown = 0;
      for (const row of step.querySelectorAll("tbody tr")) {
        const fits = (!bad.checked || row.classList.contains("bad")) &&
          (!wanted || row.textContent.toLowerCase().includes(wanted));
        row.hidden = !fits;
        shown += fits;
      }
      step.hidden = !shown;
      if (shown && (wanted || bad.checked)) step.open = true;
      count += shown;
    }
    found.textContent = wanted || bad.checked ? `${count} shown` : "";
  };
  words.addEventListener("input", narrow);
  bad.addEventListener("change", narrow);
  for (const [name, open] of [["open", true], ["close", false]])
    document.getElementById(name).addEventListener("click", () => {
      for (const step of steps) step.open = open;
    });
  document.getElementById("narrow").hidden = false;
})();
