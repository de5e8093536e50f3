// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
// The JSON of a board as a scene. Grafana does this inside its application.

import {
  ConstantVariable,
  CustomVariable,
  DataSourceVariable,
  EmbeddedScene,
  QueryVariable,
  SceneControlsSpacer,
  SceneDataTransformer,
  SceneGridItem,
  SceneGridLayout,
  SceneGridRow,
  SceneQueryRunner,
  SceneTimePicker,
  SceneTimeRange,
  SceneVariable,
  SceneVariableSet,
  TextBoxVariable,
  VariableValueSelectors,
  VizPanel,
} from '@grafana/scenes';

export interface TimeRange {
  from: string;
  to: string;
}

export function sceneOf(board: any, range: TimeRange): EmbeddedScene {
  return new EmbeddedScene({
    $timeRange: new SceneTimeRange({ ...range, timeZone: board.timezone }),
    $variables: new SceneVariableSet({ variables: (board.templating?.list ?? []).map(variableOf) }),
    controls: [new VariableValueSelectors({}), new SceneControlsSpacer(), new SceneTimePicker({})],
    body: new SceneGridLayout({ isDraggable: false, isResizable: false, isLazy: false, children: childrenOf(board) }),
  });
}

function childrenOf(board: any): Array<SceneGridItem | SceneGridRow> {
  const children: Array<SceneGridItem | SceneGridRow> = [];
  let row: SceneGridRow | undefined;
  for (const panel of opened(board.panels)) {
    if (panel.type === 'row') {
      row = new SceneGridRow({ title: panel.title, y: panel.gridPos.y, isCollapsed: false, children: [] });
      children.push(row);
    } else if (row) {
      row.setState({ children: [...row.state.children, itemOf(panel)] });
    } else {
      children.push(itemOf(panel));
    }
  }
  return children;
}

/** All panels, with collapsed rows opened: a picture is to show what is in them. */
function opened(panels: any[]): any[] {
  let shift = 0;
  return panels.flatMap((panel) => {
    const moved = (one: any, by: number) => ({ ...one, gridPos: { ...one.gridPos, y: one.gridPos.y + by } });
    const row = moved(panel, shift);
    if (panel.type !== 'row' || !panel.collapsed) {
      return [row];
    }
    const inside = panel.panels.map((one: any) => moved(one, shift));
    const bottom = Math.max(...inside.map(({ gridPos }: any) => gridPos.y + gridPos.h));
    shift += bottom - row.gridPos.y - row.gridPos.h;
    return [row, ...inside];
  });
}

function itemOf(panel: any): SceneGridItem {
  const { x, y, w: width, h: height } = panel.gridPos;
  return new SceneGridItem({ x, y, width, height, body: vizPanelOf(panel) });
}

function vizPanelOf(panel: any): VizPanel {
  const queries = new SceneQueryRunner({
    datasource: panel.datasource,
    queries: panel.targets ?? [],
    maxDataPoints: panel.maxDataPoints,
    minInterval: panel.interval,
  });
  return new VizPanel({
    key: `panel-${panel.id}`,
    pluginId: panel.type,
    title: panel.title,
    description: panel.description,
    options: panel.options ?? {},
    fieldConfig: panel.fieldConfig ?? { defaults: {}, overrides: [] },
    $data: panel.targets?.length
      ? new SceneDataTransformer({ $data: queries, transformations: panel.transformations ?? [] })
      : undefined,
  });
}

function variableOf(variable: any): SceneVariable {
  const { name, label, hide, query } = variable;
  const common = { name, label, hide };
  const choice = {
    isMulti: variable.multi,
    includeAll: variable.includeAll,
    allValue: variable.allValue,
    ...(variable.current?.value === undefined ? {} : variable.current),
  };
  switch (variable.type) {
    case 'datasource':
      return new DataSourceVariable({ ...common, ...choice, pluginId: query });
    case 'query': {
      const { datasource, sort, refresh, regex } = variable;
      return new QueryVariable({ ...common, ...choice, query, datasource, sort, refresh, regex });
    }
    case 'custom':
      return new CustomVariable({ ...common, ...choice, query });
    case 'constant':
      return new ConstantVariable({ ...common, value: query });
    case 'textbox':
      return new TextBoxVariable({ ...common, value: query });
    default:
      throw new Error(`variable ${name}: type ${variable.type} is not drawn here; add it to src/scene.ts`);
  }
}
