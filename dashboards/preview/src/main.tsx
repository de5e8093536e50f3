// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
// The page: /?board=<address>&prometheus=<address>&from=<ms>&to=<ms>&scrape=<ms>

import './boot';
import '@fontsource/inter/400.css';
import '@fontsource/inter/500.css';
import '@fontsource/inter/600.css';

import { initPluginTranslations } from '@grafana/i18n';
import { config } from '@grafana/runtime';
import { EmbeddedScene } from '@grafana/scenes';
import { GlobalStyles, PortalContainer, ThemeContext } from '@grafana/ui';
import { createRoot } from 'react-dom/client';
import { BrowserRouter } from 'react-router-dom';

import { setUp } from './grafana';
import { plugins } from './panels';
import { addError, publish, setTitle } from './report';
import { sceneOf } from './scene';

function Page({ title, scene }: { title: string; scene: EmbeddedScene }) {
  return (
    <BrowserRouter>
      <ThemeContext.Provider value={config.theme2}>
        <GlobalStyles />
        <div style={{ padding: 16, background: config.theme2.colors.background.canvas }}>
          <h1 style={{ fontSize: 20, fontWeight: 500, margin: '0 0 12px' }}>{title}</h1>
          <scene.Component model={scene} />
        </div>
        <PortalContainer />
      </ThemeContext.Provider>
    </BrowserRouter>
  );
}

async function draw(root: HTMLElement): Promise<void> {
  const parameters = new URLSearchParams(location.search);
  const asked = (name: string) => {
    const value = parameters.get(name);
    if (!value) {
      throw new Error(`the page's address has no ${name}=`);
    }
    return value;
  };
  setUp({ url: asked('prometheus'), scrapeMs: Number(asked('scrape')) }, plugins);
  await initPluginTranslations('preview', []);
  const board = await (await fetch(asked('board'))).json();
  setTitle(board.title);
  const moment = (name: string) => new Date(Number(asked(name))).toISOString();
  const scene = sceneOf(board, { from: moment('from'), to: moment('to') });
  createRoot(root).render(<Page title={board.title} scene={scene} />);
}

publish();
const root = document.getElementById('root')!;
draw(root).catch((error) => {
  addError(error);
  root.innerText = String(error);
});
