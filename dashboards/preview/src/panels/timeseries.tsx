// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
import { applyNullInsertThreshold, DataFrame, FieldType, PanelProps } from '@grafana/data';
import { TimeSeries } from '@grafana/ui';
import { useMemo } from 'react';

import { Empty, record } from './common';

const LEGEND = { calcs: [], showLegend: true, displayMode: 'list', placement: 'bottom' };

export function TimeSeriesPanel(props: PanelProps<any>) {
  record('timeseries', props);
  const { data, width, height, timeRange, timeZone, options } = props;
  const frames = useMemo(() => data.series.map(withGaps), [data.series]);
  if (!frames.length) {
    return <Empty {...props} />;
  }
  const legend: any = { ...LEGEND, ...options.legend };
  return <TimeSeries {...{ frames, width, height, timeRange, timeZone, options, legend }} />;
}

/** Gaps where a quantile is one of nothing, NaN, and where samples are missing: the component sees the first frame's. */
function withGaps(frame: DataFrame): DataFrame {
  const fields = frame.fields.map((field) =>
    field.type === FieldType.number
      ? { ...field, values: field.values.map((value) => (Number.isFinite(value) ? value : null)) }
      : field
  );
  return applyNullInsertThreshold({ frame: { ...frame, fields } });
}
