// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
// What was drawn, for a program to read: <script id="report"> in the page.

export interface Query {
  panel: string;
  refId: string;
  expr: string;
  series: number;
}

export interface Panel {
  title: string;
  type: string;
  state: string;
  error?: string;
  frames: number;
  rows: number;
}

const report = {
  title: '',
  /** Of the whole board, in pixels. */
  height: 0,
  queries: [] as Query[],
  /** By panel id. */
  panels: {} as Record<string, Panel>,
  errors: [] as string[],
};

export function setTitle(title: string): void {
  report.title = title;
}

export function addQuery(query: Query): void {
  report.queries.push(query);
}

export function setPanel(id: number, panel: Panel): void {
  report.panels[id] = panel;
}

export function addError(error: unknown): void {
  report.errors.push(error instanceof Error ? (error.stack ?? error.message) : String(error));
}

/** Keep the report in the page up to date. */
export function publish(): void {
  const element = document.createElement('script');
  element.id = 'report';
  element.type = 'application/json';
  document.body.appendChild(element);
  window.addEventListener('error', (event) => addError(event.message));
  window.addEventListener('unhandledrejection', (event) => addError(event.reason));
  setInterval(() => {
    report.height = document.getElementById('root')?.scrollHeight ?? 0;
    // No "<" inside: a text of the report must not end the element.
    element.textContent = JSON.stringify(report).replaceAll('<', '\\u003c');
  }, 250);
}
