// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
// Answers of Prometheus as Grafana's data frames, as Grafana's own data source makes them.

import { DataFrame, FieldType, toDataFrame } from '@grafana/data';

type Labels = Record<string, string>;
type Sample = [seconds: number, value: string];

interface Series {
  metric: Labels;
  values: Sample[];
}

export interface Answer {
  resultType: 'matrix' | 'vector' | 'scalar' | 'string';
  result: any;
}

export interface Target {
  refId: string;
  expr: string;
  format?: 'time_series' | 'table' | 'heatmap';
  instant?: boolean;
  range?: boolean;
  legendFormat?: string;
  hide?: boolean;
}

/** The frames of one query; `several` says whether its panel has others. */
export function framesOf(target: Target, answer: Answer, stepMs: number, several: boolean): DataFrame[] {
  const series = seriesOf(answer);
  switch (target.format) {
    case 'table':
      return [table(target.refId, series, several)];
    case 'heatmap':
      return series.length ? [heatmap(target.refId, series)] : [];
    default:
      return series.map((one) => timeSeries(target, one, stepMs));
  }
}

export function seriesOf(answer: Answer): Series[] {
  if (answer.resultType === 'scalar' || answer.resultType === 'string') {
    return [{ metric: {}, values: [answer.result] }];
  }
  return answer.result.map((one: any) => ({ metric: one.metric, values: one.values ?? [one.value] }));
}

function timeSeries(target: Target, { metric, values }: Series, stepMs: number): DataFrame {
  return toDataFrame({
    refId: target.refId,
    meta: { type: 'timeseries-multi' },
    fields: [
      // Where samples are further apart than the step the panel draws a gap.
      { ...timeField(values.map(([seconds]) => seconds)), config: { interval: stepMs } },
      {
        name: 'Value',
        type: FieldType.number,
        labels: metric,
        config: { displayNameFromDS: nameOf(target, metric) },
        values: values.map(([, value]) => numberOf(value)),
      },
    ],
  });
}

function nameOf(target: Target, metric: Labels): string {
  if (target.legendFormat && target.legendFormat !== '__auto') {
    return target.legendFormat.replace(/\{\{\s*([\w.]+)\s*\}\}/g, (_, label: string) => metric[label] ?? '');
  }
  const { __name__: name = '', ...labels } = metric;
  const inside = Object.entries(labels).map(([label, value]) => `${label}="${value}"`);
  return inside.length ? `${name}{${inside.join(', ')}}` : name || target.expr;
}

/** A row for each sample, a column for each label. */
function table(refId: string, series: Series[], several: boolean): DataFrame {
  const labels = [...new Set(series.flatMap(({ metric }) => Object.keys(metric)))].sort();
  const rows = series.flatMap(({ metric, values }) => values.map((sample) => ({ metric, sample })));
  return toDataFrame({
    refId,
    fields: [
      timeField(rows.map(({ sample }) => sample[0])),
      ...labels.map((name) => ({
        name,
        type: FieldType.string,
        values: rows.map(({ metric }) => metric[name] ?? ''),
      })),
      {
        name: several ? `Value #${refId}` : 'Value',
        type: FieldType.number,
        values: rows.map(({ sample }) => numberOf(sample[1])),
      },
    ],
  });
}

/** A field for each bucket, with what is in this bucket alone: Prometheus counts all that is below its edge. */
function heatmap(refId: string, series: Series[]): DataFrame {
  const buckets = [...series].sort((a, b) => numberOf(a.metric.le) - numberOf(b.metric.le));
  const seconds = [...new Set(buckets.flatMap(({ values }) => values.map(([at]) => at)))].sort((a, b) => a - b);
  const below = buckets.map(({ values }) => {
    const at = new Map(values);
    return seconds.map((second) => numberOf(at.get(second) ?? '0'));
  });
  return toDataFrame({
    refId,
    meta: { type: 'heatmap-rows' },
    fields: [
      timeField(seconds),
      ...buckets.map(({ metric }, row) => ({
        name: metric.le,
        type: FieldType.number,
        labels: metric,
        values: below[row].map((count, column) => Math.max(0, count - (row ? below[row - 1][column] : 0))),
      })),
    ],
  });
}

function timeField(seconds: number[]) {
  return { name: 'Time', type: FieldType.time, config: {}, values: seconds.map((second) => second * 1000) };
}

/** Prometheus writes numbers as Go does. */
export function numberOf(text: string): number {
  return text === '+Inf' ? Infinity : text === '-Inf' ? -Infinity : Number(text);
}
