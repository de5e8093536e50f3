// esbuild turns these into main.css.

declare module '*.css';
