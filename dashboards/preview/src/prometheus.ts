// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
// A Grafana data source on Prometheus' HTTP API. Grafana's own (@grafana/prometheus) is under the AGPL.

import { DataFrame, DataSourceApi } from '@grafana/data';
import { sceneGraph, SceneObject, VizPanel } from '@grafana/scenes';

import { Answer, framesOf, seriesOf, Target } from './frames';
import { addError, addQuery } from './report';

const LABEL_VALUES = /^label_values\((?:(.+),\s*)?([a-zA-Z_]\w*)\)$/s;

export interface Settings {
  url: string;
  /** The scrape interval that the data source is told, in milliseconds: no step is shorter. */
  scrapeMs: number;
}

export class Prometheus extends DataSourceApi<any, any> {
  constructor(
    instance: any,
    private readonly settings: Settings
  ) {
    super(instance);
  }

  async query(request: any): Promise<{ data: DataFrame[] }> {
    const targets: Target[] = request.targets.filter((target: Target) => !target.hide && target.expr);
    const stepMs = Math.max(request.intervalMs, this.settings.scrapeMs);
    const answers = await Promise.all(targets.map((target) => this.ask(target, request, stepMs)));
    return { data: targets.flatMap((target, index) => framesOf(target, answers[index], stepMs, targets.length > 1)) };
  }

  /** The values of a query variable. */
  async metricFindQuery(query: any, options: any): Promise<Array<{ text: string }>> {
    const text = interpolate(typeof query === 'string' ? query : query.query, options?.scopedVars);
    const match = LABEL_VALUES.exec(text);
    if (!match) {
      throw new Error(`variable query ${text}: only label_values(...) is drawn here`);
    }
    const [, selector, label] = match;
    const { from, to } = options.range;
    const values: string[] = await this.get(`label/${label}/values`, {
      start: seconds(from),
      end: seconds(to),
      ...(selector ? { 'match[]': selector } : {}),
    });
    return values.map((value) => ({ text: value }));
  }

  async testDatasource() {
    return { status: 'success' as const, message: '' };
  }

  private async ask(target: Target, request: any, stepMs: number): Promise<Answer> {
    const { from, to } = request.range;
    const expr = interpolate(target.expr, { ...request.scopedVars, ...this.intervals(stepMs, to - from) });
    const answer: Answer =
      target.instant && !target.range
        ? await this.get('query', { query: expr, time: seconds(to) })
        : await this.get('query_range', {
            query: expr,
            // On the grid of the step, so that a picture made twice is the same one.
            start: String((Math.floor(from.valueOf() / stepMs) * stepMs) / 1000),
            end: seconds(to),
            step: String(stepMs / 1000),
          });
    const panel = sceneGraph.getAncestor(sceneOf(request.scopedVars), VizPanel).state.title;
    addQuery({ panel, refId: target.refId, expr, series: seriesOf(answer).length });
    return answer;
  }

  private intervals(stepMs: number, rangeMs: number) {
    // Grafana's rule: four scrapes at least, so that a rate never has less than two samples.
    const rateMs = Math.max(stepMs + this.settings.scrapeMs, 4 * this.settings.scrapeMs);
    const values = {
      __interval: duration(stepMs),
      __interval_ms: stepMs,
      __rate_interval: duration(rateMs),
      __range: duration(rangeMs),
      __range_s: Math.round(rangeMs / 1000),
      __range_ms: rangeMs,
    };
    return Object.fromEntries(Object.entries(values).map(([name, value]) => [name, { value, text: String(value) }]));
  }

  private async get(path: string, parameters: Record<string, string>): Promise<any> {
    const response = await fetch(`${this.settings.url}/api/v1/${path}?${new URLSearchParams(parameters)}`);
    const body = await response.json();
    if (body.status !== 'success') {
      const error = new Error(`Prometheus: ${body.error}: ${parameters.query ?? path}`);
      addError(error);
      throw error;
    }
    return body.data;
  }
}

/** Put the variables' values into a text, as Grafana's Prometheus data source does: as regular expressions. */
function interpolate(text: string, scopedVars: any): string {
  return sceneGraph.interpolate(sceneOf(scopedVars), text, scopedVars, (value: any, variable: any) => {
    if (!variable.multi && !variable.includeAll) {
      return String(value).replace(/["\\]/g, '\\$&');
    }
    const values = [value].flat().map((one) => String(one).replace(/[\\^$*+?.()|[\]{}]/g, '\\\\$&'));
    return values.length > 1 ? `(${values.join('|')})` : values[0];
  });
}

/** Who asks: a panel's queries, or a variable. */
function sceneOf(scopedVars: any): SceneObject {
  return scopedVars.__sceneObject.value.valueOf();
}

function duration(ms: number): string {
  return `${Math.max(1, Math.round(ms / 1000))}s`;
}

function seconds(time: any): string {
  return String(time.valueOf() / 1000);
}
