// Runs before the first paint: apply the saved theme, or leave it to the system.
"use strict";
try {
  const chosen = localStorage.getItem("homing-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // storage is off: follow the system
}
