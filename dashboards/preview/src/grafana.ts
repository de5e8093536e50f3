// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
// What Grafana's application does before it draws anything: fills the registries and gives @grafana/runtime its services.

import {
  booleanOverrideProcessor,
  createTheme,
  dataLinksOverrideProcessor,
  displayNameOverrideProcessor,
  EventBusSrv,
  identityOverrideProcessor,
  LoadingState,
  numberOverrideProcessor,
  PanelPlugin,
  standardEditorsRegistry,
  standardFieldConfigEditorRegistry,
  standardTransformers,
  standardTransformersRegistry,
  stringOverrideProcessor,
  thresholdsOverrideProcessor,
  unitOverrideProcessor,
  valueMappingsOverrideProcessor,
} from '@grafana/data';
import {
  config,
  setAppEvents,
  setChromeHeaderHeightHook,
  setDataSourceSrv,
  setEchoSrv,
  setPluginComponentHook,
  setPluginComponentsHook,
  setPluginImportUtils,
  setPluginLinksHook,
  setReturnToPreviousHook,
  setRunRequest,
  setTemplateSrv,
} from '@grafana/runtime';
import { sceneGraph } from '@grafana/scenes';
import { catchError, from, map, of } from 'rxjs';

import { Prometheus, Settings } from './prometheus';
import { addError } from './report';

const NAME = 'prometheus';
const DEFAULT_THRESHOLDS = {
  mode: 'absolute',
  steps: [
    { value: -Infinity, color: 'green' },
    { value: 80, color: 'red' },
  ],
};
const EDITORS = [
  ...['number', 'slider', 'text', 'boolean', 'select', 'radio', 'multi-select', 'color', 'fieldColor', 'thresholds'],
  ...['mappings', 'links', 'unit', 'stats-picker', 'strings', 'timezone', 'field-name'],
];
const noEditor: any = () => null;

export function setUp(settings: Settings, plugins: Record<string, PanelPlugin>): void {
  config.theme2 = createTheme({ colors: { mode: 'light' } });
  fillRegistries();
  setPluginImportUtils({
    importPanelPlugin: async (id: string) => {
      if (!plugins[id]) {
        addError(`panel type ${id}: not drawn here; add it to src/panels/`);
      }
      return plugins[id] ?? plugins.text;
    },
    getPanelPluginFromCache: (id: string) => plugins[id],
  } as any);
  setDataSources(settings);
  setTemplateSrv({
    getVariables: () => [],
    replace: (text: string, scopedVars: any, format: any) =>
      text ? sceneGraph.interpolate(scopedVars.__sceneObject.value.valueOf(), text, scopedVars, format) : '',
    containsTemplate: (text?: string) => Boolean(text?.includes('$')),
    updateTimeRange: () => undefined,
  } as any);
  setRunRequest(((source: any, request: any) =>
    from(source.query(request)).pipe(
      map(({ data }: any) => ({ state: LoadingState.Done, series: data, timeRange: request.range, request })),
      catchError((error) =>
        of({ state: LoadingState.Error, series: [], timeRange: request.range, request, errors: [error], error })
      )
    )) as any);
  setEchoSrv({ flush: noEditor, addBackend: noEditor, addEvent: noEditor } as any);
  setAppEvents(new EventBusSrv());
  setReturnToPreviousHook(() => () => undefined);
  setChromeHeaderHeightHook(() => 0);
  setPluginLinksHook((() => ({ links: [], isLoading: false })) as any);
  setPluginComponentsHook((() => ({ components: [], isLoading: false })) as any);
  setPluginComponentHook((() => ({ component: null, isLoading: false })) as any);
}

function setDataSources(settings: Settings): void {
  const instance: any = {
    id: 1,
    uid: NAME,
    name: NAME,
    type: NAME,
    isDefault: true,
    readOnly: true,
    jsonData: {},
    url: settings.url,
    meta: { id: NAME, name: 'Prometheus', type: 'datasource', metrics: true, info: { logos: { small: '', large: '' } } },
  };
  const source = Object.assign(new Prometheus(instance, settings), { uid: NAME, meta: instance.meta });
  const checked = (reference: any, scopedVars?: any) => {
    let uid: string | undefined = typeof reference === 'string' ? reference : reference?.uid;
    if (uid?.includes('$') && scopedVars?.__sceneObject) {
      uid = sceneGraph.interpolate(scopedVars.__sceneObject.value.valueOf(), uid, scopedVars);
    }
    if (uid && uid !== NAME) {
      addError(`data source ${uid}: a board must use its variable, \${datasource}`);
    }
  };
  setDataSourceSrv({
    get: async (reference: any, scopedVars: any) => {
      checked(reference, scopedVars);
      return source;
    },
    getInstanceSettings: () => instance,
    getList: (filter: any) => (!filter?.pluginId || filter.pluginId === NAME ? [instance] : []),
    reload: () => undefined,
  } as any);
}

function fillRegistries(): void {
  standardEditorsRegistry.setInit(() =>
    EDITORS.map((id) => ({ id, name: id, description: '', editor: noEditor }))
  );
  const option = (id: string, process: any, defaultValue?: any): any => ({
    ...{ id, path: id, name: id, description: '', editor: noEditor, override: noEditor, settings: {} },
    ...{ process, defaultValue, shouldApply: () => true },
  });
  standardFieldConfigEditorRegistry.setInit(() => [
    option('unit', unitOverrideProcessor),
    option('min', numberOverrideProcessor),
    option('max', numberOverrideProcessor),
    option('decimals', numberOverrideProcessor),
    option('fieldMinMax', booleanOverrideProcessor),
    option('displayName', displayNameOverrideProcessor),
    option('noValue', stringOverrideProcessor),
    option('color', identityOverrideProcessor),
    option('thresholds', thresholdsOverrideProcessor, DEFAULT_THRESHOLDS),
    option('mappings', valueMappingsOverrideProcessor),
    option('links', dataLinksOverrideProcessor),
    option('filterable', booleanOverrideProcessor),
  ]);
  // One of them is listed twice, and a registry refuses that.
  const transformers = new Map(Object.values(standardTransformers).map((one: any) => [one.id, one]));
  standardTransformersRegistry.setInit(() =>
    [...transformers.values()].map((one) => ({
      ...{ id: one.id, name: one.name, editor: noEditor, imageDark: '', imageLight: '' },
      transformation: async () => one,
    }))
  );
}
