// Before anything is drawn: the colours that the user chose, if any.
(() => {
  const theme = localStorage.getItem("vllmx.theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
})();
