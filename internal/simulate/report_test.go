package simulate

import (
	"bytes"
	"encoding/json"
	"regexp"
	"strings"
	"testing"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

func report(t *testing.T) *Report {
	t.Helper()
	src := list{{1e9, []byte("</script><img src=x onerror=alert(1)>"), 1}, {2e9, []byte("</script><img src=x onerror=alert(1)>"), 1}, {2e9, []byte("b"), 9}}
	set := parse(t, "policies: [{name: one, algorithm: sliding_log, limit: 1, window: 1m}]")
	res := must.Value(Run(t.Context(), Config{Source: &src, Policies: set.Policies(), Suggest: &Share{}}))(t)
	return &Report{Result: res, Input: "<b>in</b>", Malformed: 1, BadLines: []BadLine{{3, "is bad", `"<i>"`}}}
}

func TestTable(t *testing.T) {
	var out strings.Builder
	must.NoError(t, report(t).WriteTable(&out))
	const want = `<b>in</b>: 3 requests of 2 keys, 1970-01-01T00:00:01Z to 1970-01-01T00:00:02Z
malformed lines, left out: 1
  line 3 is bad: "<i>"

POLICY  ALGORITHM    LIMIT     ADMITTED  REFUSED     MOST IN A WINDOW  CALLERS TOUCHED  LONGEST WAIT  STATES  SMALLEST LIMIT
one     sliding_log  1 per 1m  1         2 (66.7 %)  1 in 1m0s         2 (100 %)        59s           16 KiB  9 (callers 0 %, requests 0 %)
`
	expect.Equal(t, out.String(), want)
}

func TestJSONReport(t *testing.T) {
	var out bytes.Buffer
	must.NoError(t, report(t).WriteJSON(&out))
	var got struct {
		Events     int64
		Candidates []struct {
			Policy            string
			Admitted, Refused int64
			Impossible        int64
			Worst             struct{ Units int64 }
			Suggestion        struct{ Limit int64 }
		}
	}
	must.NoError(t, json.Unmarshal(out.Bytes(), &got), "in %s", out.Bytes())
	c := got.Candidates[0]
	expect.True(t, got.Events == 3 && c.Policy == "one" && c.Admitted == 1 && c.Refused == 2 && c.Impossible == 1 &&
		c.Worst.Units == 1 && c.Suggestion.Limit == 9, "%+v", got)
}

// Keys are text wherever they stand, and the page loads nothing.
func TestHTMLReport(t *testing.T) {
	var out strings.Builder
	must.NoError(t, report(t).WriteHTML(&out))
	page := out.String()
	for _, bad := range []string{"<img", "<b>in", "<i>"} {
		expect.True(t, !strings.Contains(page, bad), "the page has %q", bad)
	}
	n := strings.Count(page, "</script>")
	expect.True(t, n == 2, "the page ends %d scripts, want 2", n)
	expect.Equal(t, regexp.MustCompile(`(?i)(src|href)\s*=\s*["']?(https?:)?//|url\(|@import`).FindString(page), "",
		"the page loads")
	for _, want := range []string{"default-src 'none'", "66.7 %", "line 3 is bad", `id="one"`} {
		expect.True(t, strings.Contains(page, want), "the page lacks %q", want)
	}
}
