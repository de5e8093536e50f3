// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
// What all panels share.

import { PanelProps } from '@grafana/data';

import { setPanel } from '../report';

/** Tell the report what a panel was given. */
export function record(type: string, { id, title, data }: PanelProps<any>): void {
  setPanel(id, {
    ...{ title, type, state: data.state, error: data.error?.message },
    frames: data.series.length,
    rows: data.series.reduce((rows, frame) => rows + frame.length, 0),
  });
}

/** Instead of a panel that has nothing to show. */
export function Empty({ data, fieldConfig }: PanelProps<any>) {
  const text = data.error ? `Error: ${data.error.message}` : (fieldConfig.defaults.noValue ?? 'No data');
  return <div style={{ padding: 16, color: '#777' }}>{text}</div>;
}
