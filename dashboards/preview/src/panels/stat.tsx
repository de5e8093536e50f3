// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
import { getFieldDisplayValues, PanelProps } from '@grafana/data';
import { BigValue, BigValueColorMode, BigValueGraphMode, useTheme2, VizRepeater } from '@grafana/ui';

import { Empty, record } from './common';

export function StatPanel(props: PanelProps<any>) {
  record('stat', props);
  const { data, width, height, options, fieldConfig, replaceVariables, timeZone, renderCounter } = props;
  const theme = useTheme2();
  if (!data.series.length) {
    return <Empty {...props} />;
  }
  const graphMode = options.graphMode ?? BigValueGraphMode.Area;
  const getValues = () =>
    getFieldDisplayValues({
      ...{ fieldConfig, replaceVariables, theme, timeZone, data: data.series },
      reduceOptions: { calcs: ['lastNotNull'], ...options.reduceOptions },
      sparkline: graphMode !== BigValueGraphMode.None,
    });
  return (
    <VizRepeater
      {...{ width, height, getValues, renderCounter }}
      source={data}
      orientation={options.orientation ?? 'auto'}
      itemSpacing={3}
      renderValue={({ value, width, height, count }: any) => (
        <BigValue
          {...{ width, height, count, theme, graphMode }}
          value={value.display}
          sparkline={value.sparkline}
          colorMode={options.colorMode ?? BigValueColorMode.Value}
          justifyMode={options.justifyMode ?? 'auto'}
          textMode={options.textMode ?? 'auto'}
          text={options.text}
        />
      )}
    />
  );
}
