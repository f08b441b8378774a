package wire

import (
	"testing"

	"github.com/weirlimit/weir/limit"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/test/expect"
)

func TestLimitNonsense(t *testing.T) {
	for _, test := range []struct {
		limit *weirv1.Limit
		field string
	}{
		{&weirv1.Limit{}, "limit.algorithm"},
		{&weirv1.Limit{Algorithm: -1}, "limit.algorithm"},
		{&weirv1.Limit{Algorithm: 8}, "limit.algorithm"},
		{&weirv1.Limit{Algorithm: 256 + 4}, "limit.algorithm"},
		{&weirv1.Limit{Algorithm: 4, Period: -1}, "limit.period"},
		{&weirv1.Limit{Algorithm: 4, Period: 8}, "limit.period"},
		{&weirv1.Limit{Algorithm: 4, Period: 256 + 1}, "limit.period"},
		{&weirv1.Limit{Algorithm: 1, Period: 3, TimeZone: "Mars/Olympus"}, "limit.time_zone"},
		{&weirv1.Limit{Algorithm: 1, Period: 3, TimeZone: "Local"}, "limit.time_zone"},
		{&weirv1.Limit{Algorithm: 1, Period: 3, TimeZone: "../../etc/passwd"}, "limit.time_zone"},
	} {
		_, err := Target(&weirv1.Target{Limit: test.limit, Key: "k"})
		expect.True(t, err != nil && err.Field == test.field && err.Kind == limit.Invalid && err.Message != "",
			"%+v: %v", test.limit, err)
	}
	got, err := Target(nil)
	expect.True(t, err == nil && got == (limit.Target{}), "no target at all: %+v, %v", got, err)
}
