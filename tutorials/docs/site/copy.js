// Adds a button to each block of code, except to what a block prints. Of a diff, the new side is copied.

const printed = '.highlight-text, .cell_output';

function codeOf(block) {
  const text = block.querySelector('pre').textContent;
  if (!block.closest('.highlight-diff')) return text;
  const lines = text.split('\n').filter((line) => !/^(-|\+\+\+ |@@)/.test(line));
  return lines.map((line) => line.slice(1)).join('\n');
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // The page may not have the permission.
    const area = document.body.appendChild(document.createElement('textarea'));
    area.value = text;
    area.select();
    document.execCommand('copy');
    area.remove();
  }
}

for (const block of document.querySelectorAll('article .highlight')) {
  if (!block.querySelector('pre') || block.closest(printed)) continue;
  const button = document.createElement('button');
  Object.assign(button, { className: 'copy', type: 'button', textContent: 'Copy', ariaLive: 'polite' });
  button.onclick = async () => {
    await copy(codeOf(block));
    button.textContent = 'Copied';
    setTimeout(() => { button.textContent = 'Copy'; }, 1500);
  };
  block.append(button);
}
