// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
import { cacheFieldDisplayNames, PanelProps } from '@grafana/data';
import { TableNG } from '@grafana/ui/unstable';

import { Empty, record } from './common';

export function TablePanel(props: PanelProps<any>) {
  record('table', props);
  const { data, width, height, options, timeRange, fieldConfig } = props;
  const frame = data.series[options.frameIndex ?? 0];
  if (!frame?.length) {
    return <Empty {...props} />;
  }
  // The table reads names that Grafana's panel has worked out before.
  cacheFieldDisplayNames(data.series);
  return (
    <TableNG
      {...{ width, height, timeRange, fieldConfig }}
      data={frame}
      noHeader={options.showHeader === false}
      cellHeight={options.cellHeight}
      showTypeIcons={false}
      enableVirtualization={false}
      structureRev={data.structureRev}
      sortBy={options.sortBy}
      getActions={() => []}
    />
  );
}
