//! A report as an HTML page in one file, with the waits as plots.

use std::fmt::Write as _;

use super::report::{Group, Report, Waits};

/// How wide and how high a plot is, in pixels.
const PLOT: (f64, f64) = (420.0, 160.0);

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;margin:2em auto;max-width:60em;padding:0 1em;color:#222}\
table{border-collapse:collapse;margin:.5em 0}td,th{padding:.2em .8em;text-align:right;border-bottom:1px solid #ddd}\
td:first-child,th:first-child{text-align:left}.bad{color:#b00020;font-weight:600}code{background:#f4f4f4;padding:0 .2em}\
svg{margin:.5em 0}.legend span{margin-right:1.5em}";

/// The page.
pub fn page(report: &Report) -> String {
    let mut page = format!(
        "<!doctype html><html lang=en><meta charset=utf-8><title>Replay of {}</title><style>{STYLE}</style>\
         <h1>{} on {} recorded requests</h1><p>The recorded policy is <code>{}</code>. The recording is {:.1} s long.</p>",
        escaped(&report.after.policy),
        escaped(&report.after.policy),
        report.plans.requests,
        escaped(&report.before.policy),
        report.span_ms as f64 / 1_000.0
    );
    for note in &report.notes {
        let _ = write!(page, "<p>{}</p>", escaped(note));
    }
    exclusion(&mut page, report);
    plans(&mut page, report);
    let _ = write!(
        page,
        "<h2>Waits</h2><p class=legend><span style='color:#888'>recorded</span>\
        <span style='color:#1565c0'>recorded policy, replayed</span><span style='color:#e65100'>candidate</span></p>"
    );
    report.groups.iter().for_each(|group| waits(&mut page, group));
    page
}

fn exclusion(page: &mut String, report: &Report) {
    let class = if report.plans.lost_exclusion > 0 { " class=bad" } else { "" };
    let at_least = if report.plans.is_partial { "at least " } else { "" };
    let _ = write!(
        page,
        "<h2>Exclusion</h2><p{class}>Pairs of resources that no longer exclude each other: {at_least}{}. Times that two of their \
         leases were held together: {}.</p><p>Pairs that exclude each other only under the candidate: {at_least}{}.</p>",
        report.plans.lost_exclusion, report.overlaps, report.plans.new_exclusion
    );
    for (what, examples) in [("lost", &report.plans.lost_examples), ("new", &report.plans.new_examples)] {
        if examples.is_empty() {
            continue;
        }
        let _ = write!(page, "<table><tr><th>{what}<th>before<th>after");
        for pair in examples {
            for n in 0..2 {
                let [name, before, after] =
                    [&pair.requests[n], &pair.before[n], &pair.after[n]].map(|text| escaped(text));
                let _ = write!(page, "<tr><td>{name}<td><code>{before}</code><td><code>{after}</code>");
            }
        }
        page.push_str("</table>");
    }
}

fn plans(page: &mut String, report: &Report) {
    let _ = write!(
        page,
        "<h2>Plans</h2><p>{} of {} requests have another plan. The candidate refuses {} that were planned before, and plans {} \
         that were refused.</p><table><tr><th>part<th>requests<th>for example<th>before<th>after",
        report.plans.changed_plans,
        report.plans.requests,
        report.plans.newly_refused,
        report.plans.no_longer_refused
    );
    for change in &report.plans.changes {
        let [name, before, after] =
            change.examples.first().cloned().unwrap_or_default().map(|text| escaped(&text));
        let _ = write!(
            page,
            "<tr><td>{}<td>{}<td>{name}<td><code>{before}</code><td><code>{after}</code>",
            change.field, change.requests
        );
    }
    page.push_str("</table>");
}

fn waits(page: &mut String, group: &Group) {
    let name = if group.name.is_empty() { "all requests".to_owned() } else { escaped(&group.name) };
    let _ = write!(
        page,
        "<h3>{name}: {} requests</h3><table><tr><th><th>granted<th>median<th>99 %<th>longest",
        group.requests
    );
    let sides = [
        ("recorded", "#888", &group.recorded),
        ("before", "#1565c0", &group.before),
        ("candidate", "#e65100", &group.after),
    ];
    for (what, _, waits) in &sides {
        let Waits { granted, p50_ms, p99_ms, max_ms, .. } = waits;
        let _ =
            write!(page, "<tr><td>{what}<td>{granted}<td>{p50_ms:.1} ms<td>{p99_ms:.1} ms<td>{max_ms:.1} ms");
    }
    let (width, height) = PLOT;
    let longest =
        sides.iter().flat_map(|(_, _, waits)| &waits.distribution_ms).fold(1.0_f64, |a, b| a.max(*b));
    // Waits of very different lengths are compared, so the scale is logarithmic.
    let x = |ms: f64| (ms + 1.0).ln() / (longest + 1.0).ln() * width;
    let _ = write!(
        page,
        "</table><svg width={} height={} role=img aria-label='the distribution of the waits'>",
        width + 60.0,
        height + 30.0
    );
    let _ = write!(page, "<rect width={width} height={height} fill=none stroke=#ccc />");
    for (_, color, waits) in &sides {
        let points = Waits::points().iter().zip(&waits.distribution_ms);
        let points: Vec<String> =
            points.map(|(part, ms)| format!("{:.1},{:.1}", x(*ms), height - part * height)).collect();
        let _ = write!(
            page,
            "<polyline fill=none stroke='{color}' stroke-width=2 points='{}' />",
            points.join(" ")
        );
    }
    let mut tick = 1.0;
    while tick <= longest {
        let _ = write!(page, "<text x={:.1} y={} font-size=11>{tick} ms</text>", x(tick), height + 15.0);
        tick *= 10.0;
    }
    let _ = write!(page, "<text x={} y=12 font-size=11>all</text></svg>", width + 5.0);
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
        .replace('\'', "&#39;")
}
