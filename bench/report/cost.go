// SPDX-License-Identifier: Apache-2.0

package report

import "fmt"

// Cost is what a measurement cost, per operation or per amount of data.
type Cost struct {
	Per       string  `json:"per"` // "round trip", "MiB", "connection"
	CPUMicros float64 `json:"cpuMicros"`
	// Counted says that what follows was.
	Counted  bool    `json:"counted,omitempty"`
	Switches float64 `json:"contextSwitches,omitempty"`
	UDPSends float64 `json:"udpSends,omitempty"`
	TCPSends float64 `json:"tcpSends,omitempty"`
}

// CostName names one of the costs.
type CostName string

// The costs that have targets.
const UDPSends CostName = "UDP sends"

// of returns the cost of that name, and whether it was counted.
func (c Cost) of(name CostName) (v float64, counted bool) {
	if name == UDPSends {
		return c.UDPSends, c.Counted
	}
	return 0, false
}

// text is the cost for the table.
func (c Cost) text() string {
	if c.Per == "" || c.CPUMicros == 0 && !c.Counted {
		return "" // not measured, or too little to be told from what comes before it
	}
	s := "CPU " + number(c.CPUMicros) + " us"
	if c.CPUMicros >= 1e6 {
		s = "CPU " + number(c.CPUMicros/1e6) + " s"
	}
	if c.Counted {
		s += fmt.Sprintf(", %s switches, %s UDP sends", number(c.Switches), number(c.UDPSends))
	}
	return s + " per " + c.Per
}

// medianCost takes the median of each figure.
func medianCost(costs []Cost) Cost {
	if len(costs) == 0 {
		return Cost{}
	}
	pick := func(f func(Cost) float64) float64 {
		v := make([]float64, len(costs))
		for i, c := range costs {
			v[i] = f(c)
		}
		return SpreadOf(v).Median
	}
	return Cost{
		Per:       costs[0].Per,
		Counted:   costs[0].Counted,
		CPUMicros: pick(func(c Cost) float64 { return c.CPUMicros }),
		Switches:  pick(func(c Cost) float64 { return c.Switches }),
		UDPSends:  pick(func(c Cost) float64 { return c.UDPSends }),
		TCPSends:  pick(func(c Cost) float64 { return c.TCPSends }),
	}
}
