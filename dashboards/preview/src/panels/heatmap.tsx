// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
// Grafana's heatmap is inside its application, so this one is drawn here.

import { DataFrame, Field, FieldType, getDisplayProcessor, PanelProps, TimeRange } from '@grafana/data';
import { config } from '@grafana/runtime';
import { useEffect, useRef } from 'react';

import { numberOf } from '../frames';
import { Empty, record } from './common';

const LEFT = 68;
const BOTTOM = 22;
const TIME_LABEL = 80;
/** As Grafana's scheme "Oranges". */
const COLORS = [
  [255, 237, 217],
  [253, 190, 133],
  [253, 141, 60],
  [230, 85, 13],
  [143, 45, 4],
];

export function HeatmapPanel(props: PanelProps<any>) {
  record('heatmap', props);
  const { data, width, height, timeRange, options } = props;
  const canvas = useRef<HTMLCanvasElement>(null);
  const frame = data.series[0];
  useEffect(() => {
    const context = canvas.current?.getContext('2d');
    if (context && frame) {
      draw(context, frame, timeRange, options.yAxis?.unit ?? 's');
    }
  });
  return frame ? <canvas ref={canvas} width={width} height={height} /> : <Empty {...props} />;
}

function draw(context: CanvasRenderingContext2D, frame: DataFrame, range: TimeRange, unit: string): void {
  const [time, ...buckets] = frame.fields;
  const { width, height } = context.canvas;
  const begin = range.from.valueOf();
  const span = range.to.valueOf() - begin;
  const right = width - LEFT;
  const x = (at: number) => LEFT + ((at - begin) / span) * right;
  const rowHeight = (height - BOTTOM) / buckets.length;
  const stepMs = time.values.length > 1 ? time.values[1] - time.values[0] : span;
  const most = Math.max(...buckets.flatMap(({ values }) => values), Number.MIN_VALUE);
  context.clearRect(0, 0, width, height);
  context.font = '12px Inter';
  buckets.forEach((bucket, row) => {
    const top = height - BOTTOM - (row + 1) * rowHeight;
    time.values.forEach((at: number, column: number) => {
      const count = bucket.values[column];
      if (count > 0) {
        // The square root lets the few slow ones be seen beside the many fast ones.
        context.fillStyle = color(Math.sqrt(count / most));
        context.fillRect(x(at), top + 1, Math.max(1, (stepMs / span) * right), rowHeight - 1);
      }
    });
  });
  context.fillStyle = config.theme2.colors.text.secondary;
  drawEdges(context, buckets, rowHeight, unit);
  for (let left = LEFT; left + TIME_LABEL / 2 < width; left += TIME_LABEL) {
    const at = begin + ((left - LEFT) / right) * span;
    context.fillText(new Date(at).toISOString().slice(11, 16), left, height - 6);
  }
}

/** The upper edges of the buckets: of so many as there is room for. */
function drawEdges(context: CanvasRenderingContext2D, buckets: Field[], rowHeight: number, unit: string): void {
  const display = getDisplayProcessor({
    field: { name: 'le', type: FieldType.number, config: { unit }, values: [] },
    theme: config.theme2,
  });
  const every = Math.ceil(14 / rowHeight);
  buckets.forEach(({ name }, row) => {
    if (row % every === 0) {
      const { text, suffix = '' } = display(numberOf(name));
      const label = name === '+Inf' ? name : text + suffix;
      context.fillText(label, 4, context.canvas.height - BOTTOM - row * rowHeight - rowHeight / 2 + 4);
    }
  });
}

function color(share: number): string {
  const place = share * (COLORS.length - 1);
  const index = Math.min(COLORS.length - 2, Math.floor(place));
  const channel = (from: number, to: number) => Math.round(from + (to - from) * (place - index));
  return `rgb(${COLORS[index].map((from, number) => channel(from, COLORS[index + 1][number])).join(',')})`;
}
