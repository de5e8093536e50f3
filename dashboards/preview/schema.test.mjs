// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
// Planted faults in the real boards, each of which the check must name.

import assert from 'node:assert/strict';
import { readdirSync, readFileSync } from 'node:fs';
import { test } from 'node:test';

import { checker } from './schema.mjs';

const BOARDS = new URL('../../nixl_telemetry/mixin/boards/', import.meta.url);
const boards = readdirSync(BOARDS).map((name) => JSON.parse(readFileSync(new URL(name, BOARDS), 'utf8')));
const check = checker();

test('the boards themselves have no fault', () => {
  assert.ok(boards.length >= 5);
  assert.deepEqual(boards.flatMap(check), []);
});

const of = (board, type) => panelsOf(board).find((panel) => panel.type === type);
const panelsOf = (board) => board.panels.flatMap((panel) => [panel, ...(panel.panels ?? [])]);
const FAULTS = {
  'an unknown key of a panel': ['timeseries', (panel) => (panel.heading = 'x'), /heading/],
  'an unknown key of a row': ['row', (panel) => (panel.isCollapsed = true), /isCollapsed/],
  'an unknown option of a field': ['timeseries', (panel) => (panel.fieldConfig.defaults.custom.fillOpacities = 1), /fillOpacities/],
  'an unknown standard option': ['stat', (panel) => (panel.fieldConfig.defaults.units = 's'), /units/],
  'an unknown option of a panel': ['table', (panel) => (panel.options.showHeaders = true), /showHeaders/],
  'a value that is none': ['timeseries', (panel) => (panel.options.legend.displayMode = 'cards'), /displayMode/],
  'a value of another type': ['heatmap', (panel) => (panel.gridPos.w = '12'), /gridPos/],
  'an override of nothing': ['timeseries', (panel) => override(panel, 'custom.colour', 'red'), /colour/],
  'an override with a bad value': ['table', (panel) => override(panel, 'custom.align', 'middle'), /align/],
  'an option of a field where there is none': ['stat', (panel) => override(panel, 'custom.width', 1), /of its own/],
  'a type that is not known here': ['stat', (panel) => (panel.type = 'gauge2'), /not checked here/],
};

function override(panel, id, value) {
  panel.fieldConfig.overrides.push({ matcher: { id: 'byName', options: 'x' }, properties: [{ id, value }] });
}

for (const [name, [type, plant, expected]] of Object.entries(FAULTS)) {
  test(`${name} is found`, () => {
    const board = structuredClone(boards.find((one) => of(one, type)));
    plant(of(board, type));
    assert.match(check(board).join('\n'), expected);
  });
}

test('faults of the board itself, its variables and its annotations are found', () => {
  const board = structuredClone(boards[0]);
  board.refreshes = '1s';
  board.templating.list[0].queries = 'x';
  board.annotations.list[0].datasources = 'x';
  const problems = check(board).join('\n');
  for (const key of ['refreshes', 'queries', 'datasources']) {
    assert.match(problems, new RegExp(key));
  }
});
