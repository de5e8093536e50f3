// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
// Checks boards against Grafana's own types (@grafana/schema), strictly: an unknown key is an error.
//
//     node schema.mjs <board.json>...

import { readFile } from 'node:fs/promises';
import { dirname, join } from 'node:path';
import { argv } from 'node:process';
import { fileURLToPath, pathToFileURL } from 'node:url';

import Ajv from 'ajv';
import { createGenerator } from 'ts-json-schema-generator';

const HERE = dirname(fileURLToPath(import.meta.url));
const TYPES = join(HERE, 'node_modules/@grafana/schema/dist/types/raw');
const DASHBOARD = 'dashboard/x/types.gen.d.ts';
const PANELS = ['timeseries', 'stat', 'heatmap', 'table', 'text'];
/** These have options of a field of their own. */
const WITH_FIELDS = ['timeseries', 'heatmap', 'table'];

/**
 * What grafana-foundation-sdk writes and @grafana/schema does not have. Grafana ignores keys that it does not know.
 * Each: a pattern for the place, the key, and the reason.
 */
const KNOWN = [
  {
    place: /^variable /,
    key: /^(auto|auto_count|auto_min)$/,
    reason: 'the SDK has one type for all kinds of variables; these are of the kind "interval"',
  },
  {
    place: /^annotation /,
    key: /^(expr|step|titleFormat|textFormat|useValueForTime)$/,
    reason: 'what Prometheus is asked for an annotation is the data source\'s, and stands beside the common keys',
  },
  { place: /options$/, key: /^footer$/, reason: 'the table of Grafana before 12 had its footer there' },
  { place: /custom$/, key: /^cellOptions$/, reason: 'Grafana fills in the type of a cell that does not say' },
];

/** A function that returns what is wrong with a board, in one line each. */
export function checker() {
  const ajv = new Ajv({ allErrors: true, strict: false, allowUnionTypes: true });
  const add = (path, type) => {
    const schema = createGenerator({
      path: join(TYPES, path),
      tsconfig: join(HERE, 'tsconfig.json'),
      type,
      topRef: false,
      skipTypeCheck: true,
    }).createSchema(type);
    const name = `${path}:${type}`;
    ajv.addSchema(schema, name);
    return name;
  };
  // An override and a panel's defaults name some of the options, so none is required.
  const some = (name) => ajv.compile({ ...ajv.getSchema(name).schema, required: [] });

  const dashboard = add(DASHBOARD, 'Dashboard');
  const validate = {
    dashboard: ajv.getSchema(dashboard),
    annotation: ajv.compile({ $ref: `${dashboard}#/definitions/AnnotationQuery` }),
    variable: ajv.compile({ $ref: `${dashboard}#/definitions/VariableModel` }),
    panel: ajv.compile({ $ref: `${dashboard}#/definitions/Panel` }),
    row: ajv.compile({ $ref: `${dashboard}#/definitions/RowPanel` }),
    field: some(add(DASHBOARD, 'FieldConfig')),
    options: {},
    custom: {},
  };
  for (const type of PANELS) {
    const path = `composable/${type}/panelcfg/x/types.gen.d.ts`;
    validate.options[type] = some(add(path, 'Options'));
    validate.custom[type] = WITH_FIELDS.includes(type) ? some(add(path, 'FieldConfig')) : undefined;
  }
  return (board) => [...problems(board, validate)];
}

function* problems(board, validate) {
  const { panels, templating, annotations, ...rest } = board;
  yield* found('board', validate.dashboard, rest);
  for (const annotation of annotations?.list ?? []) {
    yield* found(`annotation ${annotation.name}`, validate.annotation, annotation);
  }
  for (const variable of templating?.list ?? []) {
    yield* found(`variable ${variable.name}`, validate.variable, variable);
  }
  for (const panel of panels) {
    if (panel.type === 'row') {
      yield* found(`row ${panel.title}`, validate.row, { ...panel, panels: [] });
      for (const inside of panel.panels ?? []) {
        yield* panelProblems(inside, validate);
      }
    } else {
      yield* panelProblems(panel, validate);
    }
  }
}

function* panelProblems(panel, validate) {
  const place = `panel ${panel.title}`;
  yield* found(place, validate.panel, panel);
  if (!validate.options[panel.type]) {
    yield `${place}: type ${panel.type} is not checked here; add it to PANELS`;
    return;
  }
  yield* found(`${place}: options`, validate.options[panel.type], panel.options ?? {});
  const custom = validate.custom[panel.type];
  const fields = panel.fieldConfig ?? { defaults: {}, overrides: [] };
  if (custom) {
    yield* found(`${place}: custom`, custom, fields.defaults.custom ?? {});
  }
  for (const { id, value } of fields.overrides.flatMap(({ properties }) => properties)) {
    const [name, inside] = id.startsWith('custom.') ? [id.slice('custom.'.length), true] : [id, false];
    const schema = inside ? custom : validate.field;
    yield* schema
      ? found(`${place}: override ${id}`, schema, { [name]: value })
      : [`${place}: override ${id}: ${panel.type} has no options of its own for a field`];
  }
}

function* found(place, validate, value) {
  if (validate(value)) {
    return;
  }
  for (const { instancePath, message, params } of validate.errors) {
    const key = params.additionalProperty ?? instancePath.split('/')[1] ?? '';
    if (!KNOWN.some((known) => known.place.test(place) && known.key.test(key))) {
      yield `${place}: ${instancePath || '/'} ${message} ${JSON.stringify(params)}`;
    }
  }
}

async function main(paths) {
  const check = checker();
  let count = 0;
  for (const path of paths) {
    for (const problem of check(JSON.parse(await readFile(path, 'utf8')))) {
      console.error(`${path}: ${problem}`);
      count += 1;
    }
  }
  process.exitCode = count ? 1 : 0;
}

if (argv[1] && import.meta.url === pathToFileURL(argv[1]).href) {
  await main(argv.slice(2));
}
